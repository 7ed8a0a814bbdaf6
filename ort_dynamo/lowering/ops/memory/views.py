"""Reshapes, permutations, slices and joins: the same elements in another arrangement."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from ort_dynamo.lowering.context import LoweringContext, Size, is_empty
from ort_dynamo.lowering.recipes.branches import is_small
from ort_dynamo.lowering.registry import lowering
from ort_dynamo.lowering.symbols import same_size
from ort_dynamo.torch_internals.kernels.operators import aten
from ort_dynamo.torch_internals.sizes.symbols import expression, has_hint_of_one, is_nonnegative, known_true

_FEW = 4
"""Maximum size of a last dimension whose single entries are read from a transposed tensor."""


def size_is_zero(size: Size) -> bool:
    """Check whether a size is zero; a symbolic size with a known value never is. Installs no guard."""
    return same_size(size, 0)


def axis(dim: int, rank: int) -> int:
    """`dim` counted from the front; a 0-d tensor has the dimension 0, like in torch."""
    return dim % max(rank, 1)


def from_front(index: Size, size: Size) -> Size:
    """`index`, which counts from the end where negative, counted from the front. Installs no guard."""
    if is_nonnegative(index):
        return index
    if isinstance(index, int):
        return size + index
    negative = torch.sym_min(1, torch.sym_max(0, -index))  # type: ignore[no-untyped-call]
    return index + size * negative


# -- shape -------------------------------------------------------------------------------------------------------


@lowering(
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten._reshape_alias.default,
    aten.flatten.using_ints, aten.unflatten.int, aten.view_copy.default, aten._reshape_copy.default,
)  # fmt: skip
def view(ctx: LoweringContext, self: ir.Value, *args: Any) -> ir.Value:
    """view(Tensor(a) self, SymInt[] size) -> Tensor(a)"""
    return reshape(ctx, self, ctx.sizes(self), tuple(ctx.out.shape))


def reshape(ctx: LoweringContext, value: ir.Value, sizes: Sequence[Size], new: Sequence[Size]) -> ir.Value:
    """Reshape `value` from `sizes` to `new`, with as few nodes for the new shape as possible.

    ONNX can keep a dimension at its index (0) and infer one (-1). So most symbolic reshapes have a constant shape, and
    ONNX Runtime's fusions handle those.
    """
    target: list[Size] = list(new)
    # With an empty dimension, or one that may be, 0 and -1 together have no meaning.
    if not all(known_true(size > 0) for size in (*sizes, *new)):
        return ctx.reshape(value, new)
    symbolic = [i for i, size in enumerate(new) if isinstance(size, torch.SymInt)]
    for i in symbolic:
        if i < len(sizes) and same_size(sizes[i], new[i]):
            target[i] = 0
    left = [i for i in symbolic if target[i] is new[i]]
    if len(left) == 1:
        target[left[0]] = -1
        left = []
    if left:
        return ctx.reshape(value, new)
    return ctx.op.Reshape(value, ctx.ints([int(size) for size in target]))


@lowering(aten.permute.default, aten.permute_copy.default)
def permute(ctx: LoweringContext, self: ir.Value, dims: Sequence[int]) -> ir.Value:
    """permute(Tensor(a) self, int[] dims) -> Tensor(a)"""
    rank = ctx.rank(self)
    return _transpose(ctx, self, [axis(dim, rank) for dim in dims])


@lowering(aten.transpose.int, aten.transpose_copy.int)
def transpose(ctx: LoweringContext, self: ir.Value, dim0: int, dim1: int) -> ir.Value:
    """transpose.int(Tensor(a) self, int dim0, int dim1) -> Tensor(a)"""
    order = list(range(ctx.rank(self)))
    a, b = axis(dim0, len(order)), axis(dim1, len(order))
    if order:
        order[a], order[b] = order[b], order[a]
    return _transpose(ctx, self, order)


@lowering(aten.t.default, aten.t_copy.default)
def t(ctx: LoweringContext, self: ir.Value) -> ir.Value:
    """t(Tensor(a) self) -> Tensor(a)"""
    return _transpose(ctx, self, list(range(ctx.rank(self)))[::-1])


def _transpose(ctx: LoweringContext, value: ir.Value, order: list[int]) -> ir.Value:
    node = value.producer()
    if node is not None and node.op_type == "Transpose":  # two in a row are one, or none
        inner = node.attributes["perm"].as_ints()
        order = [inner[i] for i in order]
        source = node.inputs[0]
        assert source is not None
        value = source
    if order == sorted(order):
        return value
    return ctx.op.Transpose(value, perm=order)


@lowering(aten.unsqueeze.default, aten.unsqueeze_copy.default)
def unsqueeze(ctx: LoweringContext, self: ir.Value, dim: int) -> ir.Value:
    """unsqueeze(Tensor(a) self, int dim) -> Tensor(a)"""
    return ctx.op.Unsqueeze(self, [axis(dim, ctx.rank(self) + 1)])


@lowering(
    aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims,
    aten.squeeze_copy.default, aten.squeeze_copy.dim, aten.squeeze_copy.dims,
)  # fmt: skip
def squeeze(ctx: LoweringContext, self: ir.Value, dim: int | Sequence[int] | None = None) -> ir.Value:
    """squeeze.dims(Tensor(a) self, int[] dim) -> Tensor(a)"""
    sizes = ctx.sizes(self)
    if dim is None:
        dims: Sequence[int] = range(len(sizes))
    else:
        dims = [dim] if isinstance(dim, int) else dim
    places = sorted({axis(d, len(sizes)) for d in dims if sizes})
    gone = len(sizes) - ctx.out.dim()
    if len(places) > gone:
        ones = [a for a in places if same_size(sizes[a], 1)]
        places = ones if len(ones) == gone else [a for a in places if has_hint_of_one(sizes[a])]
    return ctx.op.Squeeze(self, places) if places else self


@lowering(aten._neg_view.default, aten._neg_view_copy.default)
def neg_view(ctx: LoweringContext, self: ir.Value) -> ir.Value:
    """_neg_view(Tensor(a) self) -> Tensor(a)"""
    return ctx.op.Neg(self)


@lowering(aten.expand.default, aten.expand_copy.default)
def expand(ctx: LoweringContext, self: ir.Value, size: Sequence[Size], *, implicit: bool = False) -> ir.Value:
    """expand(Tensor(a) self, SymInt[] size, *, bool implicit=False) -> Tensor(a)"""
    return expand_to(ctx, self, ctx.sizes(self), tuple(ctx.out.shape))


def expand_to(ctx: LoweringContext, value: ir.Value, sizes: Sequence[Size], new: Sequence[Size]) -> ir.Value:
    """`value` of shape `sizes` repeated to the shape `new`."""
    lead = len(new) - len(sizes)
    # ONNX's Expand broadcasts both ways: a 1 keeps the dimension, so sizes that stay are not computed.
    target = [n if i < lead or not same_size(sizes[i - lead], n) else 1 for i, n in enumerate(new)]
    if lead == 0 and all(isinstance(size, int) and size == 1 for size in target):
        return value
    # An expanded index stays an Expand, so that its source can be found (recipes/scatter_indices.py).
    floats = value.dtype is not None and value.dtype.is_floating_point()
    if floats and lead == 0 and ctx.target.facts.walks_entries and not is_small(new) and _repeats_entries(sizes, new):
        # Repeated as a whole, and transposed.
        copies = ctx.op.Expand(
            ctx.op.Unsqueeze(ctx.op.Squeeze(value, [-1]), [0]), ctx.shape([target[-1], *target[:-1]])
        )
        return ctx.op.Transpose(copies, perm=[*range(1, len(new)), 0])
    return ctx.op.Expand(value, ctx.shape(target))


_OFTEN = 32


def _repeats_entries(sizes: Sequence[Size], new: Sequence[Size]) -> bool:
    """Check whether each entry is repeated a few times in a row, and nothing else is expanded.

    The CPU's Expand takes 10 ns for each entry then, in float32 with 2 of each 14 times as long as a Transpose of
    copies, with 32 of each four times.
    """
    *before, one = sizes
    *after, count = new
    single = isinstance(one, int) and one == 1 and isinstance(count, int) and 1 < count <= _OFTEN
    return single and all(map(same_size, before, after))


@lowering(aten.repeat.default)
def repeat(ctx: LoweringContext, self: ir.Value, repeats: Sequence[Size]) -> ir.Value:
    """repeat(Tensor self, SymInt[] repeats) -> Tensor"""
    sizes = ctx.sizes(self)
    lead = len(repeats) - len(sizes)
    value = ctx.op.Unsqueeze(self, list(range(lead))) if lead else self
    if all(isinstance(n, int) and n == 1 for n in repeats):
        return value
    if not all(isinstance(s, int) and s == 1 for s in sizes):
        return ctx.op.Tile(value, ctx.shape(repeats))
    return ctx.op.Expand(value, ctx.shape(repeats))


# -- parts -------------------------------------------------------------------------------------------------------


def cut(ctx: LoweringContext, value: ir.Value, dim: int, start: Size, end: Size, step: Size = 1) -> ir.Value:
    """value[start:end:step] along `dim`, bounds as ONNX clamps them."""
    bounds = ctx.shape([start]), ctx.shape([end]), ctx.ints([dim])
    return ctx.op.Slice(value, *bounds, *([] if same_size(step, 1) else [ctx.shape([step])]))


@lowering(aten.slice.Tensor, aten.slice_copy.Tensor)
def slice_tensor(
    ctx: LoweringContext,
    self: ir.Value,
    dim: int = 0,
    start: Size | None = None,
    end: Size | None = None,
    step: Size = 1,
) -> ir.Value:
    """slice.Tensor(Tensor(a) self, int dim=0, SymInt? start=None, SymInt? end=None, SymInt step=1) -> Tensor(a)"""
    a = axis(dim, ctx.rank(self))
    if same_size(step, 1) and same_size(ctx.sizes(self)[a], ctx.out.shape[a]):
        return self
    return cut(ctx, self, a, 0 if start is None else start, sys.maxsize if end is None else end, step)


@lowering(aten.narrow_copy.default)
def narrow_copy(ctx: LoweringContext, self: ir.Value, dim: int, start: Size, length: Size) -> ir.Value:
    """narrow_copy(Tensor self, int dim, SymInt start, SymInt length) -> Tensor"""
    a = axis(dim, ctx.rank(self))
    first = from_front(start, ctx.sizes(self)[a])
    return cut(ctx, self, a, first, first + length)


@lowering(aten.select.int, aten.select_copy.int)
def select(ctx: LoweringContext, self: ir.Value, dim: int, index: Size) -> ir.Value:
    """select.int(Tensor(a) self, int dim, SymInt index) -> Tensor(a)"""
    return _entry(ctx, self, axis(dim, ctx.rank(self)), ctx.scalar(index, torch.int64))


def _entry(ctx: LoweringContext, x: ir.Value, a: int, index: ir.Value) -> ir.Value:
    """Take one entry of a dimension.

    ONNX Runtime's CPU kernel takes 8 ns for each element that it copies apart. A Transpose that makes the last
    dimension the first, and serves all entries, takes 0.15 (4 entries) of that (1.31.1, AMD EPYC).
    """
    sizes, rank = ctx.sizes(x), ctx.rank(x)
    few = a == rank - 1 and isinstance(sizes[a], int) and sizes[a] <= _FEW
    if rank > 1 and few and ctx.target.facts.slow_at_small_sizes and not is_small(sizes[:a]):
        return ctx.op.Gather(_transpose(ctx, x, [a, *range(a)]), index, axis=0)
    return ctx.op.Gather(x, index, axis=a)


@lowering(
    aten.split.Tensor, aten.split_with_sizes.default, aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default,
    aten.chunk.default, aten.split_copy.Tensor, aten.split_with_sizes_copy.default,
)  # fmt: skip
def split(ctx: LoweringContext, self: ir.Value, split_size: Any, dim: int = 0) -> tuple[ir.Value | None, ...]:
    """split_with_sizes(Tensor(a -> *) self, SymInt[] split_sizes, int dim=0) -> Tensor(a)[]"""
    a = axis(dim, ctx.rank(self))
    sizes = [part.shape[a] for part in ctx.out]
    if len(sizes) == 1:
        return (self,)
    bounds = list(itertools.accumulate(sizes, initial=0))
    for bound in bounds:
        expression(bound)  # asked whichever parts are used: an island may use fewer than the whole graph
    if len(ctx.used) == len(sizes):
        return tuple(ctx.op.Split(self, ctx.shape(sizes), axis=a, _outputs=len(sizes)))
    pairs = enumerate(itertools.pairwise(bounds))
    return tuple(cut(ctx, self, a, start, end) if index in ctx.used else None for index, (start, end) in pairs)


@lowering(aten.unbind.int, aten.unbind_copy.int)
def unbind(ctx: LoweringContext, self: ir.Value, dim: int = 0) -> tuple[ir.Value | None, ...]:
    """unbind.int(Tensor(a -> *) self, int dim=0) -> Tensor(a)[]"""
    a = axis(dim, ctx.rank(self))
    index = (ctx.constant(i, torch.int64) if i in ctx.used else None for i in range(len(ctx.out)))
    return tuple(None if i is None else _entry(ctx, self, a, i) for i in index)


@lowering(aten.diagonal.default, aten.diagonal_copy.default)
def diagonal(ctx: LoweringContext, self: ir.Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> ir.Value:
    """diagonal(Tensor(a) self, int offset=0, int dim1=0, int dim2=1) -> Tensor(a)"""
    sizes, rank = ctx.sizes(self), ctx.rank(self)
    a, b = axis(dim1, rank), axis(dim2, rank)
    others = [i for i in range(rank) if i not in (a, b)]
    rows, columns = sizes[a], sizes[b]
    lead = [sizes[i] for i in others]
    flat = ctx.reshape(_transpose(ctx, self, [*others, a, b]), [*lead, rows * columns])
    first = offset if offset >= 0 else -offset * columns
    count = ctx.out.shape[-1]
    places = ctx.op.Range(ctx.constant(0, torch.int64), ctx.scalar(count, torch.int64), ctx.constant(1, torch.int64))
    places = ctx.op.Add(ctx.op.Mul(places, ctx.scalar(columns + 1, torch.int64)), ctx.scalar(first, torch.int64))
    return ctx.op.Gather(flat, places, axis=len(lead))


@lowering(aten.unfold.default, aten.unfold_copy.default)
def unfold(ctx: LoweringContext, self: ir.Value, dimension: int, size: int, step: int) -> ir.Value:
    """unfold(Tensor(a) self, int dimension, int size, int step) -> Tensor(a)"""
    rank = ctx.rank(self)
    a = axis(dimension, rank)
    if rank == 0:
        return ctx.op.Expand(self, ctx.ints([size]))
    if is_empty(ctx.out.shape):
        return ctx.op.Expand(ctx.constant(0, ctx.out.dtype), ctx.shape(ctx.out.shape))
    windows = ctx.out.shape[a]
    if isinstance(windows, int):
        places = ctx.op.Reshape(ctx.ints([w * step + i for w in range(windows) for i in range(size)]), [windows, size])
    else:
        zero, one = ctx.constant(0, torch.int64), ctx.constant(1, torch.int64)
        starts = ctx.op.Mul(ctx.op.Range(zero, ctx.scalar(windows, torch.int64), one), step)
        places = ctx.op.Add(ctx.op.Unsqueeze(starts, [1]), ctx.ints(range(size)))
    gathered = ctx.op.Gather(self, places, axis=a)  # …, windows, size, …
    return _transpose(ctx, gathered, [*range(a + 1), *range(a + 2, rank + 1), a + 1])


# -- joins -------------------------------------------------------------------------------------------------------


@lowering(aten.cat.default)
def cat(ctx: LoweringContext, tensors: Sequence[ir.Value], dim: int = 0) -> ir.Value:
    """cat(Tensor[] tensors, int dim=0) -> Tensor"""
    rank = ctx.out.dim()
    # torch lets 1-d empty tensors pass beside tensors of any rank.
    kept = [x for x in tensors if not (rank != 1 and ctx.rank(x) == 1)]
    a = axis(dim, rank)
    # Models that may rotate some columns only join the rotated ones with the rest, which may be empty.
    filled = [x for x in kept if not size_is_zero(ctx.sizes(x)[a])] or kept[:1]
    values = [ctx.cast(x, ctx.out.dtype) for x in filled]
    return values[0] if len(values) == 1 else ctx.op.Concat(*values, axis=a)


@lowering(aten.stack.default)
def stack(ctx: LoweringContext, tensors: Sequence[ir.Value], dim: int = 0) -> ir.Value:
    """stack(Tensor[] tensors, int dim=0) -> Tensor"""
    a = axis(dim, ctx.out.dim())
    values = [ctx.op.Unsqueeze(ctx.cast(x, ctx.out.dtype), [a]) for x in tensors]
    return values[0] if len(values) == 1 else ctx.op.Concat(*values, axis=a)
