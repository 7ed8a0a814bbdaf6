"""Put operators back after partitioning that HideSeedless replaced."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import GraphModule
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from ort_dynamo.passes.fx.analysis.untagged_operators import stands_for
from ort_dynamo.passes.ordering import Condition, ordering

__all__ = ["RestoreSeedless"]


@ordering(needs=[Condition.SEEDLESS_HIDDEN], ends=[Condition.SEEDLESS_HIDDEN])
@dataclass(frozen=True)
class RestoreSeedless(PassBase):
    """The pass puts the operators back for which HideSeedless has put functions without tags."""

    name: str = "restore_seedless"

    def call(self, graph_module: GraphModule) -> PassResult:
        """Rewrite, in place, a graph that the partitioner has seen or made."""
        modified = False
        for node in graph_module.graph.nodes:
            if (overload := stands_for(node.target)) is not None:
                node.target = overload
                modified = True
        if modified:
            graph_module.recompile()
        return PassResult(graph_module, modified)
