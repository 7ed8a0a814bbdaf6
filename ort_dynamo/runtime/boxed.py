"""The outer graph as a callable in the boxed convention: one list in, which it empties, so inputs die early."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch.fx import GraphModule
from torch.fx.graph import CodeGen

from ort_dynamo.runtime.compiled_graph import CompiledGraph, Stopped
from ort_dynamo.runtime.data_errors import data_error
from ort_dynamo.torch_internals.lazy import write_code

__all__ = ["Island", "RunWatch", "boxed"]


class Island(torch.nn.Module):
    """Stands in the outer graph for a compiled island.

    Args:
        compiled: what runs.
        places: name of an ONNX node that data can stop -> where it comes from in the user's code.
    """

    def __init__(self, compiled: CompiledGraph, places: Mapping[str, str]) -> None:
        super().__init__()
        self.compiled = compiled
        self._places = places

    def __call__(self, *values: Any) -> tuple[torch.Tensor, ...]:
        """Run the island; plain, without nn.Module's hooks, since this is called on every step.

        Raises:
            ExecutionError: ONNX Runtime stopped; IndexOutOfBoundsError if at an index in the data,
                IntegerDivisionByZeroError if at a divisor.
        """
        try:
            return self.compiled(*values)
        except Stopped as stopped:
            raise data_error(str(stopped), self._places) from stopped.__cause__


class RunWatch:
    """Sees whether a session ran in this thread, from `with` to its end; without one, a call pays for one look.

    Attributes:
        ran: whether one did.
    """

    def __init__(self) -> None:
        self.ran = False
        self._thread = threading.get_ident()

    def __enter__(self) -> Self:
        _watches.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _watches.remove(self)

    def note(self) -> None:
        """Note that a graph with a session runs in the calling thread."""
        self.ran |= threading.get_ident() == self._thread


_watches: list[RunWatch] = []


class _BoxedCodeGen(CodeGen):
    """Generates `forward(self, args_list)`, which takes its inputs out of the list and empties it."""

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **_: Any) -> str:
        names = [var.split(":")[0].split("=")[0].strip() for var in free_vars if var != "self"]
        lines = [f"def {self._func_name}(self, args_list){maybe_return_annotation}:"]
        if names:
            lines += [f"    {', '.join(names)}, = args_list", "    args_list.clear()"]
        return "\n".join(lines)


def boxed(gm: GraphModule) -> Callable[[list[Any]], Any]:
    """`gm` as a boxed function. FX's code sets each name to None after its last use."""
    gm.graph.set_codegen(_BoxedCodeGen())
    write_code(gm)
    forward: Callable[[list[Any]], Any] = gm.forward
    has_islands = any(isinstance(child, Island) for child in gm.children())

    def run(args: list[Any]) -> Any:
        if _watches and has_islands:
            for watch in tuple(_watches):
                watch.note()
        return forward(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
