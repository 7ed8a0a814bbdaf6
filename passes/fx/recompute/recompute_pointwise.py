"""Recompute in the backward the results of pointwise ops that are larger than their inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassBase, PassResult
from torch.utils.checkpoint import CheckpointPolicy

from ort_dynamo.passes.fx.analysis.fused_readers import FEW, is_no_more, is_pointwise, is_read_in_kernel
from ort_dynamo.passes.fx.analysis.saved_tensors import (
    JointGraph,
    allocations,
    bytes_of,
    can_recompute,
    is_number,
    is_tensor,
    must_recompute,
    tag,
)
from ort_dynamo.passes.fx.analysis.storage import storage_of
from ort_dynamo.passes.fx.analysis.views import is_view
from ort_dynamo.passes.ordering import Condition, ordering
from ort_dynamo.torch_internals.kernels.operators import OpOverload, aten

__all__ = ["RecomputePointwise"]

_MOST_NODES = 16
"""Operators that are recomputed for one tensor, about."""


@ordering(needs=[Condition.READS_OF_MUTATED_SAVED])
@dataclass(frozen=True)
class RecomputePointwise(PassBase):
    """Tag saved results of pointwise operators for recomputation, if they can be computed from fewer bytes.

    So for a float32 log_softmax, the forward saves the logits in a half dtype and two scalars per row. Live tensors
    count as well, since they are read once more. So a chain of sums, each of which has another reader, stays saved.

    The pass is for targets that fuse kernels: their arithmetic is free beside memory traffic. A result stays saved if a
    matmul or another operator with its own kernel reads it in the backward, since it would be written once more.

    The gradient of a ReLU asks whether the result is positive, and so is its operand then. If the kernels that read
    this gradient read the tensor that the operand can be recomputed from, the operand decides, and they need not read
    the result. So the gradient of a batch normalization with a ReLU reads the image and the gradient.
    """

    name: str = "recompute_pointwise"

    def call(self, graph_module: GraphModule) -> PassResult:
        """Tag nodes of a joint graph, and let operands of ReLUs decide, in place."""
        search = _Search(JointGraph(graph_module))
        signs = list(search.signs())
        for one in signs:
            one.gradient.update_arg(1, one.operand)
            tag(one.repeated, CheckpointPolicy.MUST_RECOMPUTE, self.name)
        if signs:
            graph_module.recompile()
            search = _Search(JointGraph(graph_module))
        is_tagged = tag(list(search.chosen()), CheckpointPolicy.MUST_RECOMPUTE, self.name)
        return PassResult(graph_module, is_tagged or bool(signs))


@dataclass(frozen=True)
class _Making:
    """A way to recompute a value.

    Attributes:
        repeated: the operators to recompute, the value's own among them; none if the value is read.
        read: the allocations that the recompute reads, with their bytes.
    """

    repeated: frozenset[Node]
    read: Mapping[int, int]

    @property
    def nbytes(self) -> int:
        """Bytes to read, and at most these to save."""
        return sum(self.read.values())


@dataclass(frozen=True)
class _Sign:
    """A gradient of a ReLU that need not read the result.

    Attributes:
        gradient: the call of threshold_backward.
        operand: the operand of the ReLU.
        repeated: the operators to recompute for it, its own among them.
    """

    gradient: Node
    operand: Node
    repeated: frozenset[Node]


class _Search:
    def __init__(self, joint: JointGraph) -> None:
        self._joint = joint
        self._returned = frozenset(map(storage_of, filter(is_tensor, joint.outputs)))
        self._kept = {storage_of(one.nodes[0]) for one in joint.cut(joint.tagged()).saved}
        inside = {storage_of(node) for node in joint.forward if is_tensor(node) and is_read_in_kernel(node)}
        every = {storage for node in joint.gm.graph.nodes for storage, _ in allocations(node)}
        self._written = every - inside

    def chosen(self) -> Iterator[Node]:
        """Yield the nodes to tag.

        A second round looks at the values that the first one saves instead, which may come before. So logits are
        recomputed from a matmul's result and a bias.
        """
        for node in (*self._joint.forward, *self._joint.forward):
            if not is_tensor(node) or not is_pointwise(node):
                continue
            storage = storage_of(node)
            if storage not in self._kept or storage in self._returned:
                continue
            made = self._joint.sharing([node])
            if not all(can_recompute(one) and self._is_read_by_kernels(one, backward=True) for one in made):
                continue
            making, nbytes = self._cheapest(node), bytes_of(node.meta["val"])[0]
            if making.nbytes < nbytes or (is_no_more(making.nbytes, nbytes) and self._saves_a_write(made, making)):
                self._kept = self._kept - {storage} | making.read.keys()
                yield from filter(can_recompute, {*making.repeated, *made})

    def signs(self) -> Iterator[_Sign]:
        """Yield the gradients of ReLUs whose readers read the tensor that makes the operand."""
        for node in self._joint.backward:
            result = node.args[1] if node.target is aten.threshold_backward.default and node.args[2] == 0 else None
            if not (isinstance(result, Node) and result.target is aten.relu.default and self._joint.is_forward(result)):
                continue
            (operand,) = result.all_input_nodes
            if not is_pointwise(operand) or not self._is_repeated(operand) or storage_of(operand) in self._returned:
                continue
            repeated, nbytes = self._behind(operand), bytes_of(operand.meta["val"])[0]
            sources = {one for made in repeated for one in made.all_input_nodes} - {*repeated}
            read = {storage: size for one in filter(is_tensor, sources) for storage, size in allocations(one)}
            large = {storage: size for storage, size in read.items() if size > nbytes // FEW}
            is_one = len(large) == 1 and is_no_more(sum(read.values()), sum(large.values()))
            if is_one and self._are_read_together(node, large.keys()):
                yield _Sign(node, operand, frozenset(filter(can_recompute, repeated)))

    def _are_read_together(self, gradient: Node, storages: Set[int]) -> bool:
        """Check whether a kernel of the backward that reads a gradient reads one of some allocations as well."""
        from_gradient, from_storages = {gradient}, set[Node]()
        for node in filter(is_tensor, self._joint.backward):
            sources = node.all_input_nodes
            if not from_gradient.isdisjoint(sources) and (is_read_in_kernel(node) or is_view(node)):
                from_gradient.add(node)
            if is_pointwise(node) or is_view(node):
                reads = (one in from_storages or (is_tensor(one) and storage_of(one) in storages) for one in sources)
                if any(reads):
                    from_storages.add(node)
                    if node in from_gradient:
                        return True
        return False

    def _saves_a_write(self, made: Sequence[Node], making: _Making) -> bool:
        """Check whether recomputing a value saves the forward a write.

        The forward writes the tensors that the recompute reads anyway, such as a matmul's result, but need not write
        the value.
        """
        unwritten = sum(nbytes for storage, nbytes in making.read.items() if storage not in self._written)
        is_small = unwritten <= making.nbytes // FEW
        return is_small and all(self._is_read_by_kernels(one, backward=False) for one in made)

    def _is_read_by_kernels(self, value: Node, *, backward: bool) -> bool:
        """Check whether the kernel that computes a value can hold every reader in the forward, or in the `backward`."""
        return all(
            self._joint.is_forward(user) == backward
            or is_read_in_kernel(user)
            or (is_view(user) and self._is_read_by_kernels(user, backward=backward))
            for user in value.users
        )

    def _cheapest(self, node: Node) -> _Making:
        """Find the way to recompute a saved value that reads the fewest bytes."""
        known: dict[Node, _Making] = {}
        for source in self._behind(node):
            known[source] = self._making(source, known, is_saved=source is node)
        return known[node]

    def _behind(self, node: Node) -> list[Node]:
        """Return the values that make a value, as far as they may be recomputed, and it itself last.

        If they are too many, the largest are among them.
        """
        found, left = {node}, [node]
        while left and len(found) <= _MOST_NODES:
            largest = max(left, key=lambda one: bytes_of(one.meta["val"])[0])
            left.remove(largest)
            for source in largest.all_input_nodes:
                if source not in found and self._is_repeated(source):
                    found.add(source)
                    left.append(source)
        return sorted(found, key=self._joint.position)

    def _making(self, node: Node, known: dict[Node, _Making], *, is_saved: bool) -> _Making:
        repeated, read = {node}, dict[int, int]()
        for source in node.all_input_nodes:
            if is_number(source):
                continue
            made = known.get(source) or _Making(frozenset(), _bytes(source))
            repeated |= made.repeated
            read |= made.read
        again = _Making(frozenset(repeated), read)
        return again if is_saved or again.nbytes < bytes_of(node.meta["val"])[0] else _Making(frozenset(), _bytes(node))

    def _is_repeated(self, source: Node) -> bool:
        return (
            is_tensor(source)
            and isinstance(source.target, OpOverload)  # not a result of several, which its maker would make again
            and self._joint.is_forward(source)
            and storage_of(source) not in self._kept
            and storage_of(source) not in self._joint.inputs_read_by_backward
            and (is_pointwise(source) or is_view(source))
            and (can_recompute(source) or must_recompute(source))
        )


def _bytes(value: Node) -> dict[int, int]:
    """Return the allocations of a value, with their bytes."""
    return dict(allocations(value))
