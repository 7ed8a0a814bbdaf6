"""Rebuild the forward's views in the backward instead of saving them."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from ort_dynamo.graph.marks import HALF
from ort_dynamo.passes.fx.analysis.mutation import mutated_storages
from ort_dynamo.passes.fx.analysis.saved_tensors import JointGraph, is_number, must_recompute
from ort_dynamo.passes.fx.analysis.storage import storage_of
from ort_dynamo.passes.ordering import Condition, ordering
from ort_dynamo.torch_internals.kernels.operators import aten
from ort_dynamo.torch_internals.kernels.view_operators import REARRANGEMENTS

__all__ = ["RecreateViews"]

_REMADE = REARRANGEMENTS | {aten.expand.default}


@ordering(needs=[Condition.VIEWS_MERGED])
@dataclass(frozen=True)
class RecreateViews(PassBase):
    """Rebuild the forward's views in the backward instead of saving them.

    The forward then saves the viewed tensor once, not one or several views of it. Memory is the same, but time is not:
    torch takes a microsecond or two for each saved view, and in a session a view costs less or nothing. For example, a
    matmul has an attribute for a transposed weight.

    The pass handles REARRANGEMENTS and `expand`, if the backward already reads all scalars that the view needs. A
    session is fed no expanded tensor without a copy. The pass leaves out slices: a session would copy them, and a
    contiguous one is saved without a copy. Recomputed nodes, their inputs and their readers are left to the
    partitioner. A view of an input that is written to has the content before the write.
    """

    name: str = "recreate_views"

    def call(self, graph_module: GraphModule) -> PassResult:
        """Rewrite a joint graph in place, after all tags are given."""
        remaker = _Recreator(graph_module)
        if modified := remaker.run():
            graph_module.recompile()
        return PassResult(graph_module, modified)


class _Recreator:
    def __init__(self, gm: GraphModule) -> None:
        self._joint = JointGraph(gm)
        self._numbers = {n for reader in self._joint.backward for n in reader.all_input_nodes if is_number(n)}
        self._mutated = mutated_storages(gm)
        self._made: dict[Node, Node] = {}

    def run(self) -> bool:
        """Rewrite the graph; whether anything changed."""
        for reader in self._joint.backward:
            for value in reader.all_input_nodes:
                if self._is_remade(value):
                    reader.replace_input_with(value, self._recreated(value, reader))
        return bool(self._made)

    def _is_remade(self, value: Node) -> bool:
        """Check whether the backward makes its own view in place of the saved view `value`."""
        return (
            value.target in _REMADE
            and self._joint.is_forward(value)
            and not any(map(must_recompute, (value, *value.all_input_nodes, *value.users)))
            and all(number in self._numbers for number in value.all_input_nodes[1:])
            and storage_of(value) not in self._mutated
        )

    def _recreated(self, value: Node, reader: Node) -> Node:
        """Return the backward's own `value`, made before `reader`, the first that wants it."""
        if value not in self._made:
            source = given = value.all_input_nodes[0]
            if self._is_remade(given):
                source = self._recreated(given, reader)
            with value.graph.inserting_before(reader):
                node = value.graph.node_copy(value, lambda argument: source if argument is given else argument)
            node.meta[HALF] = "is_backward"
            self._made[value] = node
        return self._made[value]
