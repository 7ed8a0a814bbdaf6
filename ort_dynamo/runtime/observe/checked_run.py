"""Run an outer graph once node by node, and compare each real result with its fake value."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from ort_dynamo.errors import FakeValueError
from ort_dynamo.graph.marks import WIDE_STATISTICS
from ort_dynamo.graph.source_line import user_line
from ort_dynamo.runtime.outer_code import IslandCall
from ort_dynamo.torch_internals.kernels.kernel_layouts import CONVOLUTIONS

__all__ = ["checked_once"]

_log = logging.getLogger(__name__)


def checked_once(
    gm: GraphModule,
    islands: dict[str, IslandCall],
    run: Callable[[list[Any]], Any],
    note_run: Callable[[list[Any]], Any],
) -> Callable[[list[Any]], Any]:
    """Run the first call of a graph node by node, and later calls by `run`.

    Args:
        gm: an outer graph with fake values.
        islands: name of a submodule that is an island -> how it is called.
        run: the graph as a boxed function.
        note_run: called with the inputs when a call begins, unless `run` runs it. Where it gives results, the call is
            over, and the next one is the first.

    Returns:
        A boxed function. Its first call raises FakeValueError where a result has another dtype or shape than its fake
        value, and logs a warning where it has other strides.
    """
    calls = iter([_CheckedRun(gm, islands)])
    is_checked = False

    def first(given: list[Any]) -> Any:
        nonlocal is_checked
        if is_checked:
            return run(given)
        results = note_run(given)
        if results is not None:
            return results
        checked, is_checked = next(calls, None), True
        if checked is None:  # another thread was faster
            return run(given)
        inputs, given[:] = list(given), []
        with torch.no_grad():
            return checked.run(*inputs)

    first._boxed_call = True  # type: ignore[attr-defined]
    return first


class _CheckedRun(Interpreter):
    def __init__(self, gm: GraphModule, islands: dict[str, IslandCall]) -> None:
        super().__init__(gm)
        self._islands = islands

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Call an island as the written code does."""
        if target not in self._islands:
            return super().call_module(target, args, kwargs)
        island = self._islands[target]
        try:
            return island.run(*args)
        except island.stopped as stopped:
            raise island.error(stopped) from stopped.__cause__

    def run_node(self, n: Node) -> Any:
        """Run a node, and compare."""
        result = super().run_node(n)
        if n.op in ("call_function", "call_module") and "val" in n.meta:
            _compare(n, result)
        return result


def _compare(node: Node, result: Any) -> None:
    """Compare a tensor with the fake value of its node. Of several results, those that are read are compared alone."""
    fake = node.meta["val"]
    if not (isinstance(fake, torch.Tensor) and isinstance(result, torch.Tensor)):
        return
    if fake.layout is not torch.strided or result.layout is not torch.strided:
        return
    same_dtype = fake.dtype == result.dtype or any(WIDE_STATISTICS in one.meta for one in node.all_input_nodes)
    if not same_dtype or fake.dim() != result.dim() or not _agree(fake.shape, result.shape):
        raise FakeValueError(
            node=node.format_node(),
            promised=f"{fake.dtype} {tuple(fake.shape)}",
            real=f"{result.dtype} {tuple(result.shape)}",
            where=user_line(node),
        )
    if not _is_free(node) and not _agree(*_strides_of_long(fake, result)):
        _log.warning(
            "ort_train: %s returns strides %s, but its fake implementation promises %s. Views of it "
            "become copies; results are correct.\n  %s",
            node.target,
            tuple(result.stride()),
            tuple(fake.stride()),
            user_line(node),
        )


def _agree(promised: Any, real: Any) -> bool:
    """Check whether sizes are equal; a symbol equals any size."""
    return all(isinstance(one, torch.SymInt) or one == other for one, other in zip(promised, real, strict=True))


def _strides_of_long(fake: torch.Tensor, real: torch.Tensor) -> tuple[list[Any], list[Any]]:
    """Return the strides of dimensions of several elements; of a tensor without elements, none."""
    axes = [axis for axis, size in enumerate(real.shape) if size > 1 and real.numel()]
    return [fake.stride(axis) for axis in axes], [real.stride(axis) for axis in axes]


def _is_free(node: Node) -> bool:
    """Check whether a kernel chooses the strides: of a convolution's weight gradient, made contiguous afterwards."""
    return any(one.target is CONVOLUTIONS[1] for one in node.all_input_nodes)
