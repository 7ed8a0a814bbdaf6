"""Replace a sum of tensors that are padded with zeros around each other by their concatenation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ort_dynamo.passes.onnx.analysis.new_values import NewValues
from ort_dynamo.passes.onnx.analysis.opsets import is_older
from ort_dynamo.passes.onnx.analysis.pads import Piece, padded_axis, piece_of
from ort_dynamo.passes.onnx.analysis.refusals import refuse
from ort_dynamo.passes.onnx.analysis.replacing import replace_node
from ort_dynamo.passes.onnx.analysis.shapes import are_same_sizes
from ort_dynamo.passes.onnx.analysis.value_types import infer_missing_types
from ort_dynamo.passes.ordering import Condition, ordering
from ort_dynamo.targets.target import OPSET

__all__ = ["JoinPads"]

_OPSET = 11
"""The first opset in which the pads are an input, and so may be a constant of the model."""


_SHORT = 8
"""Maximum number of elements for which a Concat is faster than a Pad."""


@dataclass(frozen=True)
class _Sum:
    """The terms of a sum.

    Attributes:
        base: the one that is no Pad; None if all are Pads.
        pads: the Pads that it adds itself, or the Reshapes of them.
        sums: the sums of Pads that it adds, which nothing else reads.
        size: the sizes of all padded tensors together.
        total: the size of the result along the axis of a Pad.
    """

    base: ir.Value | None
    pads: tuple[ir.Node, ...] = ()
    sums: tuple[ir.Node, ...] = ()
    size: int = 0
    total: int = 0


@ordering(ends=[Condition.NO_DEAD_NODES])
@dataclass(frozen=True)
class JoinPads(ir.passes.InPlacePass):
    """Rewrite a sum of tensors that are padded with zeros, and that fill an axis together, by their Concat.

    The gradient of slices is such a sum: those of the halves of a rotary embedding, or of query, key and value in one
    tensor. That of slices with a step, such as `x[..., ::2]`, is a sum of Reshapes of Pads. Each Pad and each Add goes
    through a tensor of the full size. A Concat and its sum with zero took 0.37 to 0.75 of their time (2 and 3 pieces,
    16 KiB to 15 MB, ONNX Runtime 1.31.1 and 1.19.2, one thread, AMD EPYC).

    The conditions are:

    1. each term but one is a Pad by a constant zero, along the same axis and with constant pads;
    2. the padded tensors have known sizes along it, and fill it without gaps and without common elements;
    3. nothing else reads the Pads, their Reshapes and the sums in between;
    4. the sum reads all padded tensors through Reshapes to one shape, or none.

    The one other term is added to the Concat. The result plus zero has eager's sign where it is zero: the zeros around
    the other tensors turn a sum of -0 into 0.
    A model of opset 10 or older does not change.

    Attributes:
        short_runs: whether a Pad around runs of at most 8 elements, which is in no such sum, becomes a Concat with
            zeros. ONNX Runtime's CPU kernel takes 25 ns for each run: a Concat took 0.06 of the time for runs of one
            element, 0.3 for four and 0.7 for eight, and twice the time for sixteen (1.31.1 and 1.19.2, AMD EPYC).
    """

    short_runs: bool = False

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite every match in the main graph."""
        pads = [node for node in model.graph if node.op_type == "Pad" and padded_axis(node) is not None]
        terms = [node for node in pads if _is_term(node, "Pad")]
        if is_older(model, _OPSET) or not ((self.short_runs and pads) or len(terms) > 1):
            return ir.passes.PassResult(model, False)
        infer_missing_types(model, shapes=True)
        pieces = dict(term for node in terms if (term := _term(node)) is not None)
        sums: dict[ir.Node, _Sum] = {}
        for node in model.graph:
            if node.op_type == "Add" and not node.domain:
                sums[node] = _sum(node, sums, pieces)
        new, modified = NewValues(model, self), False
        for node, found in reversed(sums.items()):  # a sum before its terms
            if node.graph is None:  # another sum has taken its terms
                continue
            if not found.total or found.size != found.total:
                continue
            inner = _inner(node, sums)
            joined = sorted(
                (pad for one in (node, *inner) for pad in sums[one].pads), key=lambda pad: pieces[pad].start
            )
            if not _fill([pieces[pad] for pad in joined]):
                refuse(self, node, "its padded terms do not fill one axis")
                continue
            if node.outputs[0].dtype is None:
                refuse(self, node, "the type of its result is not known")
                continue
            self._rewrite(new, node, found.base, [pieces[pad] for pad in joined])
            model.graph.remove([*inner, *(node for pad in joined for node in _nodes(pad))], safe=True)
            modified = True
        for pad in pads if self.short_runs else ():
            if pad.graph is not None and (piece := piece_of(pad)) is not None and _is_of_short_runs(piece):
                self._concat(new, pad, piece)
                modified = True
        return ir.passes.PassResult(model, modified)

    def _concat(self, new: NewValues, pad: ir.Node, piece: Piece) -> None:
        """Replace a Pad by a Concat with zeros."""
        tape, parts = ir.tape.Tape(), list[ir.Value]()
        for place, width in (("before", piece.start), ("after", piece.total - piece.size - piece.start)):
            if width:
                parts.append(_zeros(new, tape, piece, width, f"{pad.outputs[0].name}_{place}"))
            parts.append(piece.value)
        result = tape.op("Concat", parts[:-1], {"axis": piece.axis}, version=OPSET)
        replace_node(pad, tape, result, self)

    def _rewrite(self, new: NewValues, node: ir.Node, base: ir.Value | None, pieces: list[Piece]) -> None:
        old, tape = node.outputs[0], ir.tape.Tape()
        dtype, first = old.dtype, pieces[0]
        assert dtype is not None
        result = tape.op("Concat", [one.value for one in pieces], {"axis": first.axis}, version=OPSET)
        result.name, result.type, result.shape = new.name(f"{old.name}_pieces"), old.type, ir.Shape(first.shape)
        if first.reshape is not None:
            result = tape.op("Reshape", [result, first.reshape.inputs[1]], first.reshape.attributes, version=OPSET)
            result.name, result.type = new.name(f"{old.name}_view"), old.type
            result.shape = first.reshape.outputs[0].shape  # the base may broadcast it
        if base is not None:
            result = tape.op("Add", [base, result], version=OPSET)
            result.name, result.type, result.shape = new.name(f"{old.name}_sum"), old.type, old.shape
        if dtype.is_floating_point():
            zero = new.shared_constant(f"zero_{dtype.name.lower()}", np.zeros((), dtype.numpy()))
            result = tape.op("Add", [result, zero], version=OPSET)
        replace_node(node, tape, result, self)


def _is_term(node: ir.Node, op_type: str) -> bool:
    """Check for a node of ONNX's own operators whose result one node reads and the model does not return."""
    value = node.outputs[0]
    return node.op_type == op_type and not node.domain and len(value.uses()) == 1 and not value.is_graph_output()


def _sum(node: ir.Node, sums: Mapping[ir.Node, _Sum], pieces: Mapping[ir.Node, Piece]) -> _Sum:
    """Return the terms of a sum, given those of sums before it; of one with two other operands, none."""
    bases: list[ir.Value] = []
    pads: list[ir.Node] = []
    inner: list[ir.Node] = []
    for value in node.inputs:
        assert value is not None
        made = value.producer()
        if made is not None and made in pieces:
            pads.append(made)
        elif made is not None and made in sums and sums[made].total and _is_term(made, "Add"):
            inner.append(made)
            bases += [base for base in [sums[made].base] if base is not None]
        else:
            bases.append(value)
    if len(bases) > 1:
        return _Sum(None)
    size = sum(pieces[pad].size for pad in pads) + sum(sums[one].size for one in inner)
    total = max([*(pieces[pad].total for pad in pads), *(sums[one].total for one in inner)])
    return _Sum(bases[0] if bases else None, tuple(pads), tuple(inner), size, total)


def _inner(node: ir.Node, sums: Mapping[ir.Node, _Sum]) -> list[ir.Node]:
    """Return the sums within a sum, each after those that read it."""
    found, waiting = [], [*sums[node].sums]
    while waiting:
        one = waiting.pop()
        found.append(one)
        waiting += sums[one].sums
    return found


def _term(pad: ir.Node) -> tuple[ir.Node, Piece] | None:
    """Return the node that a sum may read, a Pad or its Reshape, with the place of the padded tensor."""
    piece = piece_of(pad)
    ((reader, index),) = pad.outputs[0].uses()
    if piece is None or index or not _is_term(reader, "Reshape"):
        return None if piece is None else (pad, piece)
    return reader, dataclasses.replace(piece, reshape=reader)


def _nodes(term: ir.Node) -> Iterator[ir.Node]:
    """Yield a Reshape before its Pad, or the Pad alone."""
    yield term
    if term.op_type == "Reshape" and (source := term.inputs[0]) is not None and (pad := source.producer()) is not None:
        yield pad


def _zeros(new: NewValues, tape: ir.tape.Tape, piece: Piece, width: int, name: str) -> ir.Value:
    """Make zeros as large as a tensor but for their size along its axis; ONNX Runtime would fold an Expand of zero."""

    def made(kind: str, inputs: list[ir.Value], what: str, **attributes: int) -> ir.Value:
        value = tape.op(kind, inputs, attributes, version=OPSET)
        value.name = new.name(f"{name}_{what}")
        return value

    rank = len(piece.shape)
    none = new.shape([0] * rank)
    empty = made("Slice", [piece.value, none, none], "empty")
    before, later = _integers(piece.shape[: piece.axis]), [width, *_integers(piece.shape[piece.axis + 1 :])]
    if len(before) == piece.axis:
        return made("Pad", [empty, new.shape([0] * rank + before + later)], "zeros")
    leading = made("Slice", [made("Shape", [piece.value], "shape"), new.shape([0]), new.shape([piece.axis])], "leading")
    return made("Pad", [empty, made("Concat", [none, leading, new.shape(later)], "sizes", axis=0)], "zeros")


def _integers(sizes: Sequence[int | ir.SymbolicDim]) -> list[int]:
    return [size for size in sizes if isinstance(size, int)]


def _is_of_short_runs(piece: Piece) -> bool:
    """Check whether the elements between two pieces of padding are few."""
    later = piece.shape[piece.axis + 1 :]
    known = _integers(later)
    return len(known) == len(later) and 0 < math.prod([piece.size, *known]) <= _SHORT


def _fill(pieces: list[Piece]) -> bool:
    """Check whether tensors, in order and as large as an axis together, fill that axis of one shape."""
    first, end = pieces[0], 0
    for one in pieces:
        if not _is_read_alike(one.reshape, first.reshape):
            return False
        if one.start != end or one.axis != first.axis or not are_same_sizes(one.shape, first.shape):
            return False
        end += one.size
    return True


def _is_read_alike(one: ir.Node | None, other: ir.Node | None) -> bool:
    """Check whether neither of two tensors is read through a Reshape, or both are, to one shape."""
    if one is None or other is None:
        return one is other
    first, second = one.outputs[0].shape, other.outputs[0].shape
    return first is not None and second is not None and are_same_sizes(tuple(first), tuple(second))
