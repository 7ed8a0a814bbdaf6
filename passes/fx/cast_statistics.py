"""Cast statistics that a session gives to a gradient that torch runs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import GraphModule
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from ort_dynamo.graph.marks import KERNEL_READS
from ort_dynamo.passes.fx.analysis.fake_values import add_call
from ort_dynamo.torch_internals.kernels.operators import prims

__all__ = ["CastStatistics"]


@dataclass(frozen=True)
class CastStatistics(PassBase):
    """Give a normalization's gradient in torch its statistics in the dtype that torch's kernel takes.

    KeepStatisticsWide made them float32 for the gradient in a session. Of gradients that torch runs by choice,
    GiveKernelDtypes has seen to it before. Here are those that no session takes, which is known last.
    """

    name: str = "cast_statistics"

    def call(self, graph_module: GraphModule) -> PassResult:
        """Insert casts in an outer graph."""
        graph, modified = graph_module.graph, False
        for node in list(graph.nodes):
            wanted: dict[int, torch.dtype] = node.meta.get(KERNEL_READS, {})
            for index, dtype in wanted.items():
                statistics = node.args[index]
                if statistics.meta["val"].dtype != dtype:
                    with graph.inserting_before(node):
                        cast = add_call(graph, prims.convert_element_type.default, (statistics, dtype))
                    node.update_arg(index, cast)
                    modified = True
        if modified:
            graph_module.recompile()
        return PassResult(graph_module, modified)
