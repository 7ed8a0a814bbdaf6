"""Mark sigmoids that only scale other tensors, so that lowerings may take a faster kernel for them."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from ort_dynamo.graph.marks import GATE
from ort_dynamo.torch_internals.kernels.operators import aten
from ort_dynamo.torch_internals.kernels.view_operators import VIEWS

__all__ = ["MarkGates"]

_SIGMOID = aten.sigmoid.default
_SCALING = frozenset({aten.mul.Tensor, aten.sigmoid_backward.default})


@dataclass(frozen=True)
class MarkGates(PassBase):
    """Set GATE on each sigmoid whose readers multiply by it, in the forward and in the backward.

    ONNX Runtime's CPU kernel has an absolute error of 1e-7 and gives 0 below -18. In a multiplication this is rounding.
    A logarithm, a division or the program may need more: log(sigmoid(-20)) is -20, not -inf.
    """

    name: str = "mark_gates"

    def call(self, graph_module: GraphModule) -> PassResult:
        """Mark nodes of a joint graph, before it is cut, or of an inference graph."""
        modified = False
        for node in graph_module.graph.find_nodes(op="call_function", target=_SIGMOID):
            alike = [user for user in node.all_input_nodes[0].users if user.target is _SIGMOID]  # torch may merge them
            if GATE not in node.meta and all(map(_only_scales, alike)):
                node.meta[GATE] = modified = True
        return PassResult(graph_module, modified)


def _only_scales(node: Node) -> bool:
    return all(user.target in _SCALING or (user.target in VIEWS and _only_scales(user)) for user in node.users)
