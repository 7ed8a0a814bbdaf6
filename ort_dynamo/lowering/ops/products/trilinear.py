"""Sums of products of three tensors, for bilinear layers and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_lowercase

import onnx_ir as ir

from ort_dynamo.lowering.context import LoweringContext, is_empty
from ort_dynamo.lowering.ops.memory.creation import filled
from ort_dynamo.lowering.recipes.promotion import float_dtype
from ort_dynamo.lowering.registry import lowering
from ort_dynamo.torch_internals.kernels.operators import aten


@lowering(aten._trilinear.default)
def trilinear(
    ctx: LoweringContext,
    i1: ir.Value,
    i2: ir.Value,
    i3: ir.Value,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    sumdim: Sequence[int],
    unroll_dim: int = 1,
) -> ir.Value:
    """_trilinear(Tensor i1, Tensor i2, Tensor i3, int[] expand1, int[] expand2, int[] expand3, int[] sumdim,
    int unroll_dim=1) -> Tensor
    """
    del unroll_dim  # the order in which torch sums
    tensors, expanded = (i1, i2, i3), (expand1, expand2, expand3)
    if any(is_empty(ctx.sizes(tensor)) for tensor in tensors):
        return filled(ctx, 0)
    letters = ascii_lowercase[: ctx.rank(i1) + len(expand1)]

    def without(dims: Sequence[int]) -> str:
        return "".join(letter for dim, letter in enumerate(letters) if dim not in dims)

    dtype = float_dtype(ctx.out.dtype)
    equation = f"{','.join(map(without, expanded))}->{without(sumdim)}"
    product = ctx.op.Einsum(*(ctx.cast(tensor, dtype) for tensor in tensors), equation=equation)
    return ctx.cast(product, ctx.out.dtype)
