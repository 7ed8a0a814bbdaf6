"""Matmuls of consecutive groups of rows with a matrix each: mixtures of experts.

A Loop over the groups multiplies exactly the rows there are; rows are neither padded nor masked. The operator itself
in eager, a Python loop, takes longer (float32, one thread, ms; groups, rows, inner and outer size; onnxruntime 1.31.1):

| | eager | Loop | unrolled | padded to the longest group, batched |
|---|---|---|---|---|
| 8, 2048, 1024, 2048 | 261 | 113 | 74 | 101 |
| 64, 512, 256, 512 | 8.2 | 2.8 | 9.9 | 6.7 |
| 128, 4096, 512, 768 | 94 | 65 | 117 | 81 |
| 128, 64, 64, 128 | 0.19 | 0.59 | 0.29 | 0.16 |
"""

from __future__ import annotations

import onnx_ir as ir
import torch

from ort_dynamo.lowering.context import LoweringContext, Size
from ort_dynamo.lowering.op_builder import OpBuilder
from ort_dynamo.lowering.ops.products.matmul import product, transposed
from ort_dynamo.lowering.recipes.loops import Carried, for_each
from ort_dynamo.lowering.registry import lowering, named_lowering
from ort_dynamo.torch_internals.kernels.operators import aten

_FLOAT = ir.DataType.FLOAT


class _Groups:
    """The groups of rows that end at `ends`; rows after the last end belong to none."""

    def __init__(self, ctx: LoweringContext, ends: ir.Value) -> None:
        self._ctx = ctx
        self._ends = ctx.cast(ends, torch.int64)
        (self._count,) = ctx.sizes(ends)

    def products(
        self, rows: ir.Value, matrices: ir.Value | None, others: ir.Value | None, width: Size = 0
    ) -> tuple[ir.Value | None, ir.Value | None]:
        """Multiply each group's `rows` by its matrix, and its part of `others`, transposed, by its `rows`.

        Args:
            rows: (S, N).
            matrices: (groups, N, width), or None where the first matmul is not asked for.
            others: (S, M), or None where the second is not asked for.

        Returns:
            (S, width), zeros in rows of no group, and (groups, M, N), zeros for empty groups.
        """
        ctx = self._ctx
        plain = None if matrices is None else transposed(matrices)  # one matrix is transposed at a time, not the stack
        rows, others = self._widened(rows), None if others is None else self._widened(others)
        dtype = rows.dtype
        fills = ctx.target.has_defect("empty_products")  # a row of zeros more changes no sum, and is never empty
        row, other_row = (self._zeros(value) if fills and others is not None else None for value in (rows, others))

        def step(op: OpBuilder, index: ir.Value, carried: Carried) -> tuple[Carried, Carried, Carried]:
            (begin,) = carried
            end = op.Unsqueeze(op.Gather(self._ends, index), [0])
            group = op.Slice(rows, begin, end, [0])
            blocks, slabs = [], []
            if matrices is not None:
                matrix = op.Gather(matrices if plain is None else plain, index)
                matrix = matrix if matrix.dtype == dtype else op.Cast(matrix, to=dtype)
                block = op.MatMul(group, matrix if plain is None else op.Transpose(matrix, perm=[1, 0]))
                # ONNX has no sequences of bfloat16.
                blocks.append(op.Cast(block, to=_FLOAT) if dtype == ir.DataType.BFLOAT16 else block)
            if others is not None:
                other = op.Slice(others, begin, end, [0])
                if fills:
                    group, other = op.Concat(group, row, axis=0), op.Concat(other, other_row, axis=0)
                slabs.append(op.MatMul(op.Transpose(other, perm=[1, 0]), group))
            return [end], blocks, slabs

        (end,), blocks, slabs = for_each(ctx, self._count, [ctx.ints([0])], step)
        return self._joined(blocks[0], end, rows, width) if blocks else None, slabs[0] if slabs else None

    def _widened(self, value: ir.Value) -> ir.Value:
        assert value.dtype is not None
        if self._ctx.target.takes("MatMul", "", {"T": value.dtype}):
            return value
        return self._ctx.cast(value, torch.float32)

    def _zeros(self, value: ir.Value | None) -> ir.Value:
        """One row of zeros, as wide as `value`."""
        assert value is not None
        assert value.dtype is not None
        op = self._ctx.op
        shape = op.Concat(self._ctx.ints([1]), op.Shape(value, start=1, end=2), axis=0)
        row: ir.Value = op.Expand(self._ctx.builder.constant(0, value.dtype), shape)
        return row

    def _joined(self, blocks: ir.Value, end: ir.Value, rows: ir.Value, width: Size) -> ir.Value:
        ctx, op = self._ctx, self._ctx.op
        dtype = blocks.dtype
        assert dtype is not None
        rest = op.Concat(op.Sub(op.Shape(rows, start=0, end=1), end), ctx.shape([width]), axis=0)
        more = op.SequenceInsert(blocks, op.Expand(ctx.builder.constant(0, dtype), rest))
        more.type = ir.SequenceType(ir.TensorType(dtype))
        joined: ir.Value = op.ConcatFromSequence(more, axis=0)
        joined.type = ir.TensorType(dtype)
        return joined


def _swapped(ctx: LoweringContext, value: ir.Value) -> ir.Value:
    """`value` transposed in its last two dimensions."""
    inner = transposed(value)
    if inner is not None:
        return inner
    rank = ctx.rank(value)
    swapped: ir.Value = ctx.op.Transpose(value, perm=[*range(rank - 2), rank - 1, rank - 2])
    return swapped


@lowering(aten._grouped_mm.default)
def grouped_mm(
    ctx: LoweringContext,
    self: ir.Value,
    mat2: ir.Value,
    offs: ir.Value | None = None,
    bias: ir.Value | None = None,
    out_dtype: torch.dtype | None = None,
) -> ir.Value:
    """_grouped_mm(Tensor self, Tensor mat2, Tensor? offs=None, Tensor? bias=None, ScalarType? out_dtype=None) -> Tensor

    The groups that offs ends are of the dimension that the 2-D operands have in common, or of the one's that is 2-D.
    """
    if bias is not None:
        raise ctx.refuse("a bias for each group, which torch does not support yet")
    ranks = ctx.rank(self), ctx.rank(mat2)
    if offs is None:
        return ctx.cast(product(ctx, self, mat2), ctx.out.dtype)
    groups = _Groups(ctx, offs)
    found: ir.Value | None
    if ranks == (2, 2):
        _, found = groups.products(mat2, None, _swapped(ctx, self))
    elif ranks == (2, 3):
        found, _ = groups.products(self, mat2, None, ctx.sizes(mat2)[-1])
    else:
        found, _ = groups.products(_swapped(ctx, mat2), _swapped(ctx, self), None, ctx.sizes(self)[-2])
        found = ctx.op.Transpose(found, perm=[1, 0])
    assert found is not None
    return ctx.cast(found, ctx.out.dtype)


@named_lowering("transformers.grouped_mm_fallback.default")
def grouped_mm_fallback(ctx: LoweringContext, input: ir.Value, weight: ir.Value, offs: ir.Value) -> ir.Value:
    """transformers::grouped_mm_fallback(Tensor input, Tensor weight, Tensor offs) -> Tensor

    The models of transformers 5 with experts call it under torch.compile unless their weights are bfloat16.
    """
    found, _ = _Groups(ctx, offs).products(input, weight, None, ctx.sizes(weight)[-1])
    assert found is not None
    return ctx.cast(found, ctx.out.dtype)


@named_lowering("transformers.grouped_mm_fallback_backward.default")
def grouped_mm_fallback_backward(
    ctx: LoweringContext, input: ir.Value, weight: ir.Value, offs: ir.Value, grad_output: ir.Value
) -> tuple[ir.Value | None, ir.Value | None]:
    """transformers::grouped_mm_fallback_backward(Tensor input, Tensor weight, Tensor offs, Tensor grad_output) -> (Tensor, Tensor)"""  # noqa: E501
    matrices = _swapped(ctx, weight) if 0 in ctx.used else None
    others = input if 1 in ctx.used else None
    found = _Groups(ctx, offs).products(grad_output, matrices, others, ctx.sizes(input)[-1])
    grad_input, grad_weight = (v and ctx.cast(v, fake.dtype) for v, fake in zip(found, ctx.out, strict=True))
    return grad_input, grad_weight
