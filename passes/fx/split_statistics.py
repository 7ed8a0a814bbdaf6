"""Recompute a BatchNorm in the backward without its running statistics, which have changed by then."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from ort_dynamo.graph.marks import RECOMPUTE, STANDS_BESIDE
from ort_dynamo.passes.fx.analysis.batch_statistics import SHARED, WITH_RUNNING, WITHOUT_RUNNING
from ort_dynamo.passes.fx.analysis.fake_values import add_call
from ort_dynamo.passes.fx.analysis.saved_tensors import must_recompute
from ort_dynamo.passes.ordering import Condition, ordering
from ort_dynamo.torch_internals.kernels.operators import is_absent

__all__ = ["SplitStatistics"]


@ordering(gives=[Condition.STATISTICS_SPLIT])
@dataclass(frozen=True)
class SplitStatistics(PassBase):
    """The pass gives a recomputed BatchNorm's readers to an operator without running statistics beside it.

    Result, mean and reciprocal deviation do not depend on the running statistics, but an operator that is computed
    again saves all it reads. The original stays, untagged, for the new running statistics. MergeStatistics makes one
    of both in the forward.
    """

    name: str = "split_statistics"

    def call(self, graph_module: GraphModule) -> PassResult:
        """Rewrite a joint graph in place, after all tags are given."""
        modified = False
        found = (
            () if is_absent(WITHOUT_RUNNING) else graph_module.graph.find_nodes(op="call_function", target=WITH_RUNNING)
        )
        for node in found:
            shared = [user for user in node.users if user.args[1] in range(SHARED)]
            # In evaluation the result is made of the running statistics, and they are not changed.
            if any(map(must_recompute, shared)) and node.args[5] is True:
                _split(node, shared)
                modified = True
        if modified:
            graph_module.recompile()
        return PassResult(graph_module, modified)


def _split(node: Node, shared: list[Node]) -> None:
    tensor, weight, bias, _, _, training, momentum, eps = node.args
    with node.graph.inserting_after(node):
        args = (tensor, weight, bias, training, momentum, eps)
        without = add_call(node.graph, WITHOUT_RUNNING, args, meta={**node.meta, STANDS_BESIDE: node.name})
    node.meta.pop(RECOMPUTE, None)
    for user in list(node.users):
        if user in shared:
            user.args = (without, user.args[1])
        else:
            user.meta.pop(RECOMPUTE, None)  # a result of the forward, which nothing in the backward reads
