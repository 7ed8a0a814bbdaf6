"""Save nothing in a forward whose backward never runs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassBase, PassResult

__all__ = ["SaveNoTensors", "husk"]


def husk(tensor: torch.Tensor) -> torch.Tensor:
    """Return one element expanded to the shape of `tensor`."""
    return tensor.new_empty(()).expand(tensor.shape)


husk.keeps_value = True  # type: ignore[attr-defined]  # the fake value is that of the replaced tensor


@dataclass(frozen=True)
class SaveNoTensors(PassBase):
    """Return a `husk` of each tensor that the forward would save for the backward.

    The saved tensors may take gigabytes, and the process would not return all of them to the system.

    Args:
        outputs: the number of leading outputs that are the graph's own results.
    """

    outputs: int
    name: str = "save_no_tensors"

    def call(self, graph_module: GraphModule) -> PassResult:
        """Rewrite a forward graph in place."""
        graph = graph_module.graph
        (output,) = graph.find_nodes(op="output")
        results = output.args[0]
        husks: dict[Node, Node] = {}
        for node in results[self.outputs :]:
            if _is_computed(node) and node not in husks:
                with graph.inserting_after(node):
                    husks[node] = graph.call_function(husk, (node,))
                husks[node].meta = dict(node.meta)
        if husks:
            output.args = ((*results[: self.outputs], *(husks.get(node, node) for node in results[self.outputs :])),)
            graph_module.recompile()
        return PassResult(graph_module, bool(husks))


def _is_computed(value: object) -> bool:
    if not isinstance(value, Node) or value.op != "call_function" or value.target is husk:
        return False
    return isinstance(value.meta.get("val"), torch.Tensor)
