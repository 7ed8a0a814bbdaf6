"""Give statistics that cross between torch and a session the dtypes of torch's kernels."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from ort_dynamo.graph.marks import CHOSEN, READS_WIDE_STATISTICS, WIDE_STATISTICS
from ort_dynamo.passes.fx.analysis.fake_values import FakeValues
from ort_dynamo.passes.fx.analysis.statistics import STATISTICS, gradients_reading, normalizes
from ort_dynamo.passes.ordering import Condition, ordering
from ort_dynamo.torch_internals.kernels.kernel_dtypes import running_dtypes, statistics_dtype

__all__ = ["GiveKernelDtypes"]


@ordering(needs=[Condition.PLACED])
@dataclass(frozen=True)
class GiveKernelDtypes(PassBase):
    """Mark the dtypes of torch's kernel on normalizations that torch runs, or whose gradients torch runs.

    Fake tensors have other dtypes for half types: those that the trace gave, or float32 where KeepStatisticsWide found
    that gradients alone read them. A session's values have the dtypes of fake tensors, and torch's kernels neither give
    nor take those. Where sessions run both a normalization and its gradients, statistics stay float32.
    """

    name: str = "give_kernel_dtypes"

    def call(self, graph_module: GraphModule) -> PassResult:
        """Mark nodes of a joint or inference graph, whose fake values follow."""
        values, modified = FakeValues(graph_module), False
        for node in graph_module.graph.nodes:
            if normalizes(node):
                modified |= _mark(node)
        if modified:
            values.update()
        return PassResult(graph_module, modified)


def _mark(node: Node) -> bool:
    """Mark a normalization and the gradients that read its statistics."""
    given: Any = map_arg(node.args, lambda one: one.meta["val"])
    runs_in_torch = CHOSEN in node.meta
    wanted = running_dtypes(node.target, given) if runs_in_torch else {}  # type: ignore[arg-type]
    statistics = statistics_dtype(node.target, given)
    for result in node.users:
        if result.target is not operator.getitem or result.args[1] not in STATISTICS[node.target]:
            continue
        _, gradients, _ = gradients_reading(result)
        if runs_in_torch or any(CHOSEN in gradient.meta for gradient, _ in gradients):
            wanted[result.args[1]] = statistics  # type: ignore[index]
            for gradient, alias in gradients:
                _note_traced(gradient, alias, result.meta["val"].dtype)
    marked: dict[int, torch.dtype] = node.meta.get(WIDE_STATISTICS, {})
    dtypes = {index: fake.dtype for index, fake in enumerate(node.meta["val"]) if isinstance(fake, torch.Tensor)}
    if all(dtypes.get(index, dtype) == dtype for index, dtype in wanted.items()):
        return False
    node.meta[WIDE_STATISTICS] = {**marked, **wanted}
    return True


def _note_traced(gradient: Node, alias: Node, dtype: torch.dtype) -> None:
    """Note of a gradient's statistic the dtype that the trace gave it, if no pass has changed that before."""
    noted: dict[int, torch.dtype] = gradient.meta.get(READS_WIDE_STATISTICS, {})
    read = {index: dtype for index, argument in enumerate(gradient.args) if argument is alias}
    gradient.meta[READS_WIDE_STATISTICS] = {**read, **noted}
