"""Compute a recomputed BatchNorm once in the forward, with its running statistics."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import GraphModule
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from ort_dynamo.graph.marks import STANDS_BESIDE
from ort_dynamo.passes.fx.analysis.batch_statistics import WITHOUT_RUNNING
from ort_dynamo.passes.ordering import Condition, ordering

__all__ = ["MergeStatistics"]


@ordering(needs=[Condition.STATISTICS_SPLIT], ends=[Condition.STATISTICS_SPLIT])
@dataclass(frozen=True)
class MergeStatistics(PassBase):
    """Replace the operator that SplitStatistics added by the original one, in graphs that have both."""

    name: str = "merge_statistics"

    def call(self, graph_module: GraphModule) -> PassResult:
        """Rewrite a forward graph in place."""
        graph = graph_module.graph
        nodes = {node.name: node for node in graph.nodes}
        modified = False
        for node in graph.find_nodes(op="call_function", target=WITHOUT_RUNNING):
            if node.meta.get(STANDS_BESIDE) in nodes:
                node.replace_all_uses_with(nodes[node.meta[STANDS_BESIDE]])
                graph.erase_node(node)
                modified = True
        if modified:
            graph_module.recompile()
        return PassResult(graph_module, modified)
