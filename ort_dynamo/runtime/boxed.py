"""The outer graph as a callable in the boxed convention: one list in, which it empties, so inputs die early."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule
from torch.fx.graph import CodeGen

from ort_dynamo.runtime.compiled_graph import CompiledGraph

__all__ = ["Island", "boxed"]


class Island(torch.nn.Module):
    """Stands in the outer graph for a compiled island."""

    def __init__(self, compiled: CompiledGraph) -> None:
        super().__init__()
        self.compiled = compiled

    def __call__(self, *values: Any) -> tuple[torch.Tensor, ...]:
        """Run the island; plain, without nn.Module's hooks, since this is called on every step."""
        return self.compiled(*values)


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
    gm.recompile()
    forward: Callable[[list[Any]], Any] = gm.forward

    def run(args: list[Any]) -> Any:
        return forward(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
