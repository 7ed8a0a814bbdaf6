"""Add the user's line to assertions on data, since it is unknown by the time they fail."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from ort_dynamo.graph.source_line import describe
from ort_dynamo.torch_internals.kernels.operators import aten

__all__ = ["LocateAssertions"]


@dataclass(frozen=True)
class LocateAssertions(PassBase):
    """The outer graph's assertions on data get a message that ends with the operator, the module and the user's line.

    Such are torch._assert_async and the nodes that Dynamo makes of `assert` on a tensor. torch runs them, as part of
    the graph, where Python's own traceback ends at the call of the graph.
    """

    name: str = "locate_assertions"

    def call(self, graph_module: GraphModule) -> PassResult:
        """Rewrite, in place, an outer graph."""
        asserted = [node for node in graph_module.graph.nodes if node.target in _WITH_MESSAGE and len(node.args) > 1]
        changed = [node for node in asserted if not str(node.args[1]).endswith(_place(node))]
        for node in changed:
            node.update_arg(1, f"{node.args[1]}{_place(node)}")
        if changed:
            graph_module.recompile()
        return PassResult(graph_module, bool(changed))


_WITH_MESSAGE = (aten._assert_async.msg, aten._functional_assert_async.msg, aten._assert_scalar.default)


def _place(node: Node) -> str:
    return "".join(f"\n  {line}" for line in describe(node).splitlines())
