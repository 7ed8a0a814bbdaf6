"""The gradient of a normalization or an attention gets the statistics in the type that the kernel computes them in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from ort_dynamo.graph.marks import KERNEL_READS, READS_WIDE_STATISTICS, WIDE_STATISTICS
from ort_dynamo.passes.fx.analysis.fake_values import propagate
from ort_dynamo.passes.fx.analysis.statistics import STATISTICS, gradients_reading, normalizes
from ort_dynamo.torch_internals.kernels.kernel_dtypes import statistics_dtype

__all__ = ["KeepStatisticsWide"]


@dataclass(frozen=True)
class KeepStatisticsWide(PassBase):
    """Keep statistics that only gradients read in float64 if the input is float64, else in float32.

    If parameters are float32, as under autocast, torch's normalization kernels compute and save them in float32. But
    its traced graphs on the CPU give them the input's dtype. A mean that is rounded to bfloat16 has a relative error of
    2⁻⁹, and in the gradient the deviations from it no longer cancel. The wider dtype is cheap: there is one scalar per
    channel or row. For attention in float64, graphs of torch 2.12 and older give them as float32.
    """

    name: str = "keep_statistics_wide"

    def call(self, graph_module: GraphModule) -> PassResult:
        """Mark nodes of a joint graph, whose fake values follow: from these, lowerings take their dtypes."""
        modified = False
        for node in graph_module.graph.nodes:
            if node.target not in STATISTICS:
                continue
            wide = torch.promote_types(node.args[0].meta["val"].dtype, torch.float32)
            for result in node.users:
                if result.args[1] in STATISTICS[node.target] and result.meta["val"].dtype != wide:
                    modified |= _widen(node, result, wide)
        return PassResult(graph_module, modified)


def _widen(node: Node, result: Node, wide: torch.dtype) -> bool:
    """Give one result of a node another dtype, with its aliases, if gradients alone read it."""
    aliases, gradients, alone = gradients_reading(result)
    if not alone:
        return False
    narrow = result.meta["val"].dtype
    for gradient, alias in gradients:
        places = [index for index, argument in enumerate(gradient.args) if argument is alias]
        _note(gradient, READS_WIDE_STATISTICS, dict.fromkeys(places, narrow))
        if normalizes(node):
            given: Any = map_arg(node.args, lambda one: one.meta["val"])
            _note(gradient, KERNEL_READS, dict.fromkeys(places, statistics_dtype(node.target, given)))
    node.meta[WIDE_STATISTICS] = {**node.meta.get(WIDE_STATISTICS, {}), result.args[1]: wide}
    propagate([node, *aliases])
    return True


def _note(node: Node, mark: str, dtypes: Mapping[int, torch.dtype]) -> None:
    node.meta[mark] = {**node.meta.get(mark, {}), **dtypes}
