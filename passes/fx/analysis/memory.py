"""Records the tensors that a compiled forward saves and its backward recomputes, and the memory that both take."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import sympy
import torch
from torch.fx import GraphModule, Node

from ort_dynamo.graph.marks import DECIDED_BY, SECTION
from ort_dynamo.graph.source_line import user_line
from ort_dynamo.passes.fx.analysis.saved_tensors import (
    JointGraph,
    allocations,
    bytes_of,
    is_tangent,
    is_tensor,
    time_of,
)
from ort_dynamo.passes.fx.analysis.storage import storage_of, storages_of
from ort_dynamo.passes.fx.analysis.views import is_view, maker_of
from ort_dynamo.torch_internals.kernels.operators import aten

__all__ = [
    "MemoryRecord",
    "Recomputed",
    "SavedTensor",
    "alive_alone",
    "alive_bytes",
    "freed_by_backward",
    "memory_record",
    "peaks",
]

_SELECTIONS = frozenset(
    {
        aten.masked_fill.Scalar,
        aten.masked_fill.Tensor,
        aten.threshold.default,
        aten.threshold_backward.default,  # as a multiplication by the mask
        aten.where.ScalarOther,
        aten.where.ScalarSelf,
        aten.where.self,
    }
)
"""Operators that ONNX Runtime runs as Where, whose CPU kernel makes either side as a tensor and then merges them."""


@dataclass(frozen=True)
class SavedTensor:
    """One allocation that the forward saves for the backward.

    Attributes:
        name: the node that is saved; of several views of the allocation, the first.
        shape: its shape, symbolic sizes as text.
        dtype: its dtype.
        nbytes: bytes of the whole allocation; symbolic sizes by their example.
        size: the same in symbols.
        operator: the operator that made it.
        where: the user's line that called the operator.
    """

    name: str
    shape: tuple[int | str, ...]
    dtype: torch.dtype
    nbytes: int
    size: sympy.Expr
    operator: str
    where: str


@dataclass(frozen=True)
class Recomputed:
    """One computation that the backward recomputes; views, which cost nothing, are not listed.

    Attributes:
        name: its node.
        operator: its operator.
        where: the user's line that called it.
        by: the pass that decided it, or "torch.utils.checkpoint".
        time: estimated, as a share of the forward's time.
    """

    name: str
    operator: str
    where: str
    by: str
    time: float


@dataclass(frozen=True)
class MemoryRecord:
    """The result of partitioning one joint graph. Bytes of symbolic sizes are those of their example.

    Attributes:
        saved: tensors that the forward saves, in its order; inputs and parameters are not counted.
        recomputed: nodes that the backward recomputes, in its order.
        nbytes_without: bytes that would be saved if nothing were recomputed.
        forward_peak: most bytes that the forward holds at once, inputs of the graph and parameters not counted.
        backward_peak: the same of the backward; the forward's saved tensors are counted.
    """

    saved: tuple[SavedTensor, ...]
    recomputed: tuple[Recomputed, ...]
    nbytes_without: int
    forward_peak: int
    backward_peak: int

    @property
    def nbytes(self) -> int:
        """Bytes saved between forward and backward."""
        return sum(one.nbytes for one in self.saved)

    @property
    def size(self) -> sympy.Expr:
        """The same in symbols."""
        return sympy.Add(*(one.size for one in self.saved))

    @property
    def time(self) -> float:
        """Estimated time of the recomputed operators, as a share of the forward's."""
        return sum(one.time for one in self.recomputed)

    @property
    def peak(self) -> int:
        """Most bytes held at once."""
        return max(self.forward_peak, self.backward_peak)

    def summary(self) -> str:
        """One line."""
        before = self.nbytes_without  # 0 where nothing would be saved, such as tensors of no elements
        share = f" ({self.nbytes / before:.0%} of {before:,})" if self.recomputed and before else ""
        again = f"; {len(self.recomputed)} recomputed, {self.time:.1%} of the forward" if self.recomputed else ""
        return (
            f"{self.nbytes:,} bytes saved for the backward{share} in {len(self.saved)} tensors{again}; "
            f"predicted peak {self.forward_peak:,} bytes in the forward, {self.backward_peak:,} in the backward"
        )


def memory_record(joint: GraphModule, forward: GraphModule, backward: GraphModule, outputs: int) -> MemoryRecord:
    """Read the saved and recomputed tensors off a partitioned joint graph.

    Args:
        joint: the joint graph, with its tags.
        forward: the forward graph.
        backward: the backward graph.
        outputs: the number of the forward's leading outputs that are the graph's own results.
    """
    whole = JointGraph(joint)
    own = {node.name for node in whole.forward}
    results = forward.graph.output_node().args[0]
    assert isinstance(results, (tuple, list))
    inputs = _inputs(forward)
    kept: dict[int, Node] = {}
    for node in _tensors(results[outputs:]):
        if storage_of(node) not in inputs:
            kept.setdefault(storage_of(node), node)
    time = sum(time_of(node) for node in forward.graph.nodes if node.op == "call_function")
    again = [n for n in backward.graph.nodes if n.op == "call_function" and n.name in own and not is_view(n)]
    return MemoryRecord(
        tuple(map(_saved, kept.values())),
        tuple(_recomputed(node, time) for node in again),
        whole.cut(()).nbytes,
        *peaks(forward, backward),
    )


def freed_by_backward(forward: GraphModule, backward: GraphModule, outputs: int) -> tuple[str, ...]:
    """Return the names of the backward's inputs that nothing else holds, so that their last reader frees them.

    Inputs of the graph, parameters and results that the forward returns are held by others, gradients by autograd.

    Args:
        forward: the forward graph.
        backward: the backward graph.
        outputs: the number of the forward's leading outputs that are the graph's own results.
    """
    results = forward.graph.output_node().args[0]
    assert isinstance(results, (tuple, list))
    returned = (node for node in results[:outputs] if isinstance(node, Node))
    held = _inputs(forward).union(*map(storages_of, returned))
    saved = (node for node in backward.graph.find_nodes(op="placeholder") if not is_tangent(node))
    return tuple(node.name for node in saved if (own := storages_of(node)) and own.isdisjoint(held))


def peaks(forward: GraphModule, backward: GraphModule) -> tuple[int, int]:
    """Most bytes that forward and backward hold at once, inputs of the graph and parameters not counted."""
    ahead, back = alive_bytes(forward, backward)
    return max(ahead), max(back)


def alive_bytes(forward: GraphModule, backward: GraphModule) -> tuple[list[int], list[int]]:
    """Estimate the live bytes before the first operator of forward and backward, and at each operator, in order.

    Inputs of the graph and parameters are not counted. An allocation lives from the node that computes it to the last
    node that reads it or a view of it. Results live to the end of their graph. The inputs of a backward section, mainly
    saved tensors, live at least to the section's end, since a session holds its inputs until it returns. Without
    sections that is the end of the backward. A selection by a mask needs two more tensors of its result's size while it
    runs. Not counted are other scratch memory of kernels, rounding by allocators, and changes by ONNX Runtime to the
    order and by fusions.
    """
    inputs = _inputs(forward)
    return _alive(forward, (), inputs), _alive(backward, backward.graph.find_nodes(op="placeholder"), inputs)


def alive_alone(gm: GraphModule) -> list[int]:
    """Give the same of a graph without a backward."""
    return _alive(gm, (), _inputs(gm))


def _inputs(gm: GraphModule) -> set[int]:
    return {storage for node in gm.graph.find_nodes(op="placeholder") for storage in storages_of(node)}


def _tensors(values: Iterable[object]) -> list[Node]:
    return [value for value in values if isinstance(value, Node) and is_tensor(value)]


def _saved(node: Node) -> SavedTensor:
    fake: torch.Tensor = node.meta["val"]
    maker = maker_of(node)
    shape = tuple(size if isinstance(size, int) else str(size) for size in fake.shape)
    return SavedTensor(node.name, shape, fake.dtype, *bytes_of(fake), str(maker.target), user_line(maker))


def _recomputed(node: Node, forward_time: float) -> Recomputed:
    by = node.meta.get(DECIDED_BY, "torch.utils.checkpoint")
    time = time_of(node) / forward_time if forward_time else 0.0
    return Recomputed(node.name, str(node.target), user_line(node), by, time)


def _alive(gm: GraphModule, held: Iterable[Node], free: Collection[int]) -> list[int]:
    """Bytes alive at the start of a sweep over `gm`, and at each of its operators.

    Args:
        gm: the forward or the backward graph.
        held: inputs that count.
        free: allocations that do not count.
    """
    alive = {storage: nbytes for node in held for storage, nbytes in allocations(node) if storage not in free}
    total = sum(alive.values())
    found = [total]
    own = {node: storages_of(node) for node in gm.graph.nodes}
    last = _last_readers(gm, own)
    ends: dict[Node, set[int]] = {}
    for storage, node in last.items():
        ends.setdefault(node, set()).add(storage)
    for node in own:
        if node.op != "call_function":
            continue
        for storage, nbytes in allocations(node):
            if storage not in free and storage not in alive:
                alive[storage] = nbytes
                total += nbytes
        unread = own[node] - last.keys()  # an unread allocation ends at once
        ended = {s: alive.pop(s) for s in ends.get(node, set()) | unread if s in alive}
        found.append(total + _scratch(node, ended))
        total -= sum(ended.values())
    return found


def _last_readers(gm: GraphModule, own: Mapping[Node, set[int]]) -> dict[int, Node]:
    """Allocation -> the node with whose end it ends: its last reader, or the last node of a section it was handed to.

    Results end with the output, and so do the gradients that a backward is given: autograd holds them.
    """
    closes = {node.meta.get(SECTION, 0): node for node in own if node.op == "call_function"}
    made: dict[int, int] = {}
    for node in own:
        section = -1 if node.op == "placeholder" else node.meta.get(SECTION, 0)
        for storage in own[node]:
            made.setdefault(storage, section)
    last: dict[int, Node] = {}
    for node in own:
        section = node.meta.get(SECTION, 0)
        for storage in {storage for read in node.all_input_nodes for storage in own[read]}:
            last[storage] = closes[section] if node.op != "output" and made[storage] != section else node
    output = gm.graph.output_node()
    for node in filter(is_tangent, own):
        last |= dict.fromkeys(own[node], output)
    return last


def _scratch(node: Node, ended: Mapping[int, int]) -> int:
    """Bytes that a node takes while it runs, beside its result and its arguments.

    Args:
        node: a call of an operator.
        ended: the allocations that no later node reads, with their bytes.
    """
    if node.target not in _SELECTIONS:
        return 0
    fake: torch.Tensor = node.meta["val"]
    nbytes, _ = bytes_of(fake)
    if node.target is not aten.threshold_backward.default:
        return 2 * nbytes
    compared = node.args[1]
    assert isinstance(compared, Node)
    # A factor and the mask of blocked elements; the operands of the mask may be gone.
    return nbytes + nbytes // fake.dtype.itemsize - ended.get(storage_of(compared), 0)
