"""embedding_bag: rows of a table, summed, averaged or maximised per bag of indices, with its gradients.

A bag is the range of indices between two offsets. Entries that equal `padding_idx` count for nothing: they go to one
bag more, which is cut off.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

import onnx_ir as ir
import torch

from ort_dynamo.lowering.context import LoweringContext, Size, is_empty
from ort_dynamo.lowering.ops.layers.embedding import clear_row
from ort_dynamo.lowering.recipes.checks import any_of, stop_if
from ort_dynamo.lowering.recipes.positions import from_start
from ort_dynamo.lowering.recipes.promotion import float_dtype
from ort_dynamo.lowering.recipes.sums.add_rows import add_rows
from ort_dynamo.lowering.recipes.sums.running_sum import running_sum
from ort_dynamo.lowering.recipes.zeros import zeros
from ort_dynamo.lowering.registry import lowering
from ort_dynamo.lowering.symbols import same_size
from ort_dynamo.torch_internals.kernels.operators import aten

_SUM, _MEAN, _MAX = range(3)
_OUTPUT, _BAG_OF_ENTRY, _BAG_SIZES, _MAXIMA = range(4)


@dataclass(frozen=True)
class _Entries:
    """The entries of all bags.

    Attributes:
        rows: int64, the table's row of each entry.
        bags: int64, the bag of each entry.
        kept: int64, the same, but the bag after the last for an entry that is padding.
        bag_sizes: int64, how many entries that are no padding each bag has.
        entries, bag_count: how many there are.
    """

    rows: ir.Value
    bags: ir.Value
    kept: ir.Value
    bag_sizes: ir.Value
    entries: Size
    bag_count: Size


def _bags(ctx: LoweringContext, offsets: ir.Value, entries: Size) -> ir.Value:
    """Return the bag of each entry: how many bags have begun, less one. A last offset of `entries` begins none."""
    op = ctx.op
    starts = from_start(ctx, offsets)
    ones = op.Expand(ctx.constant(1, torch.int64), op.Shape(starts))
    begun = op.ScatterElements(zeros(ctx, starts, [entries + 1]), starts, ones, axis=0, reduction="add")
    total = running_sum(ctx, begun)
    return op.Sub(op.Slice(total, [0], ctx.shape([entries])), 1)


def _checked(ctx: LoweringContext, offsets: ir.Value, entries: Size) -> ir.Value:
    """`offsets`, the session stops unless the first is 0 and the last within the `entries`, or there are none."""
    if is_empty(ctx.sizes(offsets)):
        return offsets
    op, distances = ctx.op, ctx.op.Abs(ctx.cast(offsets, torch.int64))
    first = op.Greater(op.Slice(distances, [0], [1]), 0)
    last = op.Greater(op.Slice(distances, [-1], [sys.maxsize]), ctx.scalar(entries, torch.int64))
    beyond = op.Concat(ctx.builder.constant([False], ir.DataType.BOOL), first, last, axis=0)
    words = "offsets[0] has to be 0, and offsets[-1] can not be greater than the length of the input"
    return ctx.stand_in(stop_if(ctx, any_of(ctx, beyond), offsets, words, 1), offsets)


def _sort_entries(
    ctx: LoweringContext, indices: ir.Value, offsets: ir.Value, bag_count: Size, padding_idx: int
) -> _Entries:
    op = ctx.op
    (entries,) = ctx.sizes(indices)
    rows = ctx.cast(indices, torch.int64)
    bags = kept = _bags(ctx, op.Slice(offsets, [0], ctx.shape([bag_count])), entries)
    if padding_idx >= 0:
        kept = op.Where(op.Equal(rows, padding_idx), ctx.scalar(bag_count, torch.int64), bags)
    ones = op.Expand(ctx.constant(1, torch.int64), op.Shape(rows))
    counted = op.ScatterElements(zeros(ctx, rows, [bag_count + 1]), kept, ones, axis=0, reduction="add")
    sizes = op.Slice(counted, [0], ctx.shape([bag_count]))
    return _Entries(rows, bags, kept, sizes, entries, bag_count)


@lowering(aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
def embedding_bag(
    ctx: LoweringContext,
    weight: ir.Value,
    indices: ir.Value,
    offsets: ir.Value,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: ir.Value | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[ir.Value | None, ...]:
    """_embedding_bag(Tensor weight, Tensor indices, Tensor offsets, bool scale_grad_by_freq=False, int mode=0, bool sparse=False, Tensor? per_sample_weights=None, bool include_last_offset=False, int padding_idx=-1) -> (Tensor, Tensor, Tensor, Tensor)"""  # noqa: E501
    op = ctx.op
    bag_count, width = ctx.out[_OUTPUT].shape
    offsets = _checked(ctx, offsets, ctx.sizes(indices)[0])
    every = _sort_entries(ctx, indices, offsets, bag_count, padding_idx)
    dtype = float_dtype(ctx.dtype(weight))
    rows = ctx.cast(op.Gather(weight, from_start(ctx, every.rows, ctx.sizes(weight)[0]), axis=0), dtype)
    maxima = None
    if mode == _MAX:
        output, maxima = _maximum(ctx, every, rows, width)
    else:
        if per_sample_weights is not None:
            rows = op.Mul(rows, op.Unsqueeze(ctx.cast(per_sample_weights, dtype), [-1]))
        table = add_rows(ctx, zeros(ctx, rows, [(bag_count + 1) * width]), every.kept, rows, width)
        output = op.Slice(ctx.reshape(table, [bag_count + 1, width]), [0], ctx.shape([bag_count]))
        if mode == _MEAN:
            output = op.Div(output, op.Unsqueeze(ctx.cast(op.Max(every.bag_sizes, 1), dtype), [-1]))
    # Nothing reads the sizes of bags that are summed, and torch leaves them zero.
    bag_sizes = zeros(ctx, every.rows, [bag_count]) if mode == _SUM else every.bag_sizes
    results = [ctx.cast(output, ctx.out[_OUTPUT].dtype), every.bags, bag_sizes]
    results.append(bag_sizes if maxima is None else maxima)
    lengths = [bag_count, every.entries, bag_count, bag_count]
    return tuple(
        _as_torch_sizes(ctx, value, length, index) if index in ctx.used else None
        for index, (value, length) in enumerate(zip(results, lengths, strict=True))
    )


def _as_torch_sizes(ctx: LoweringContext, value: ir.Value, have: Size, index: int) -> ir.Value:
    """`value` as long as torch's output `index`: in some modes empty, or with one entry more."""
    fake = ctx.out[index]
    wanted = fake.shape[0]
    value = ctx.cast(value, fake.dtype)
    if same_size(wanted, have):
        return value
    if same_size(wanted, 0):
        return ctx.op.Slice(value, [0], [0])
    return ctx.op.Pad(value, ctx.shape([0, wanted - have]))


def _maximum(ctx: LoweringContext, every: _Entries, rows: ir.Value, width: Size) -> tuple[ir.Value, ir.Value]:
    """Return the largest entry of each bag and column, and the table's row it is in; 0 and 0 for an empty bag.

    Like torch's kernel, which starts with a bag's first entry and replaces it by greater ones, the first of equal
    entries wins, and nan counts only where it comes first.
    """
    op = ctx.op
    bags, entries = every.bag_count, every.entries
    dtype = float_dtype(ctx.out[_OUTPUT].dtype)
    sizes = [bags + 1, width]
    place = op.Expand(op.Unsqueeze(every.kept, [-1]), ctx.shape([entries, width]))
    zero, one = ctx.constant(0, torch.int64), ctx.constant(1, torch.int64)
    number = op.Expand(op.Unsqueeze(op.Range(zero, ctx.scalar(entries, torch.int64), one), [-1]), op.Shape(place))
    none = op.Add(zeros(ctx, every.rows, sizes), ctx.scalar(entries, torch.int64))  # after the last entry
    first = op.ScatterElements(none, place, number, axis=0, reduction="min")
    is_nan = op.IsNaN(rows)
    # A first nan beats everything, any other loses against everything.
    is_first = op.Equal(number, op.GatherElements(first, place, axis=0))
    rank = op.Where(is_nan, op.Where(is_first, ctx.constant(math.inf, dtype), ctx.constant(-math.inf, dtype)), rows)
    low = op.Add(zeros(ctx, rows, sizes), ctx.constant(-math.inf, dtype))
    high = op.ScatterElements(low, place, rank, axis=0, reduction="max")
    reaches = op.Equal(rank, op.GatherElements(high, place, axis=0))
    # If an infinity replaces a first nan, that entry is also the first to reach it.
    winner = op.ScatterElements(none, place, op.Where(reaches, number, ctx.scalar(entries, torch.int64)), axis=0,
                                reduction="min")  # fmt: skip
    winner = op.Slice(winner, [0], ctx.shape([bags]))
    # Empty bags read one row more, of zeros.
    values = op.Concat(rows, zeros(ctx, rows, [1, width]), axis=0)
    places = op.Concat(every.rows, zeros(ctx, every.rows, [1]), axis=0)
    return op.GatherElements(values, winner, axis=0), op.Gather(places, winner, axis=0)


# -- gradients ---------------------------------------------------------------------------------------------------


@lowering(aten._embedding_bag_backward.default)
def embedding_bag_backward(
    ctx: LoweringContext,
    grad: ir.Value,
    indices: ir.Value,
    offsets: ir.Value,
    offset2bag: ir.Value,
    bag_size: ir.Value,
    maximum_indices: ir.Value,
    num_weights: Size,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: ir.Value | None,
    padding_idx: int = -1,
) -> ir.Value:
    """_embedding_bag_backward(Tensor grad, Tensor indices, Tensor offsets, Tensor offset2bag, Tensor bag_size, Tensor maximum_indices, SymInt num_weights, bool scale_grad_by_freq, int mode, bool sparse, Tensor? per_sample_weights, int padding_idx=-1) -> Tensor"""  # noqa: E501
    starts = ctx.op.Slice(offsets, [0], ctx.shape([ctx.sizes(grad)[0]]))
    bags = _bags(ctx, starts, ctx.sizes(indices)[0])
    return _weight_gradient(
        ctx, grad, indices, bags, bag_size, maximum_indices, num_weights, scale_grad_by_freq, mode,
        per_sample_weights, padding_idx,
    )  # fmt: skip


@lowering(aten._embedding_bag_dense_backward.default)
def _weight_gradient(
    ctx: LoweringContext,
    grad: ir.Value,
    indices: ir.Value,
    offset2bag: ir.Value,
    bag_size: ir.Value,
    maximum_indices: ir.Value,
    num_weights: Size,
    scale_grad_by_freq: bool,
    mode: int,
    per_sample_weights: ir.Value | None,
    padding_idx: int = -1,
) -> ir.Value:
    """_embedding_bag_dense_backward(Tensor grad, Tensor indices, Tensor offset2bag, Tensor bag_size, Tensor maximum_indices, SymInt num_weights, bool scale_grad_by_freq, int mode, Tensor? per_sample_weights, int padding_idx=-1) -> Tensor"""  # noqa: E501
    if scale_grad_by_freq and mode != _MAX:
        # torch's CPU kernel indexes the counts by the position among unique rows: counts[sorted_indices[i]].
        raise ctx.refuse("torch's embedding_bag with scale_grad_by_freq divides by the count of another row")
    op = ctx.op
    dtype = float_dtype(ctx.out.dtype)
    width = ctx.sizes(grad)[-1]
    grad = ctx.cast(grad, dtype)
    table = zeros(ctx, grad, [num_weights * width])
    if mode == _MAX:
        filled = op.Greater(op.Unsqueeze(bag_size, [-1]), ctx.constant(0, ctx.dtype(bag_size)))
        columns = op.Range(ctx.constant(0, torch.int64), ctx.scalar(width, torch.int64), ctx.constant(1, torch.int64))
        starts = op.Mul(ctx.cast(maximum_indices, torch.int64), ctx.scalar(width, torch.int64))
        places = op.Reshape(op.Add(starts, columns), [-1])
        values = op.Reshape(op.Where(filled, grad, 0.0), [-1])
        result = op.ScatterElements(table, places, values, axis=0, reduction="add")
        return ctx.cast(ctx.reshape(result, [num_weights, width]), ctx.out.dtype)
    rows, bags = ctx.cast(indices, torch.int64), ctx.cast(offset2bag, torch.int64)
    values = op.Gather(grad, bags, axis=0)
    if mode == _MEAN:
        sizes = ctx.cast(op.Gather(bag_size, bags, axis=0), dtype)
        values = op.Div(values, op.Unsqueeze(op.Max(sizes, 1.0), [-1]))
    if per_sample_weights is not None:
        values = op.Mul(values, op.Unsqueeze(ctx.cast(per_sample_weights, dtype), [-1]))
    result = ctx.reshape(add_rows(ctx, table, rows, values, width), [num_weights, width])
    if padding_idx >= 0:
        result = clear_row(ctx, result, padding_idx, width)
    return ctx.cast(result, ctx.out.dtype)


@lowering(aten._embedding_bag_per_sample_weights_backward.default)
def per_sample_weights_backward(
    ctx: LoweringContext,
    grad: ir.Value,
    weight: ir.Value,
    indices: ir.Value,
    offsets: ir.Value,
    offset2bag: ir.Value,
    mode: int,
    padding_idx: int = -1,
) -> ir.Value:
    """_embedding_bag_per_sample_weights_backward(Tensor grad, Tensor weight, Tensor indices, Tensor offsets, Tensor offset2bag, int mode, int padding_idx=-1) -> Tensor"""  # noqa: E501
    op = ctx.op
    dtype = float_dtype(ctx.out.dtype)
    bags = _bags(ctx, op.Slice(offsets, [0], ctx.shape([ctx.sizes(grad)[0]])), ctx.sizes(indices)[0])
    of_output = ctx.cast(op.Gather(grad, bags, axis=0), dtype)
    of_table = ctx.cast(op.Gather(weight, indices, axis=0), dtype)
    result = op.ReduceSum(op.Mul(of_output, of_table), [1], keepdims=0)  # not [-1]: defect last_axis_of_nothing
    if padding_idx >= 0:
        result = op.Where(op.Equal(ctx.cast(indices, torch.int64), padding_idx), 0.0, result)
    return ctx.cast(result, ctx.out.dtype)
