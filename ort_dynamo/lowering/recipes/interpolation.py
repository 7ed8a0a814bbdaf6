"""Writes a resize as a linear map along each axis: the matrix that torch's own kernel applies, and matmuls with it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import torch

from ort_dynamo.lowering.context import LoweringContext, Size
from ort_dynamo.lowering.op_builder import OpBuilder
from ort_dynamo.lowering.recipes.branches import if_finite
from ort_dynamo.torch_internals.kernels.dispatcher import real_kernels
from ort_dynamo.torch_internals.kernels.operators import aten

__all__ = ["Length", "LinearMap", "Resize", "apply_maps", "resize_map", "source_index"]

Matrix = npt.NDArray[np.float64]
Length = TypeVar("Length", bound=Size)
"""Type of an axis' length: int where a matrix is made here, Size where the session makes it (antialias.py)."""

_DENSE = 512
"""Maximum length of an axis for a dense matmul, whose work grows with the product of both lengths."""


@dataclass(frozen=True)
class Resize(Generic[Length]):
    """One axis of a resize.

    Attributes:
        mode: "nearest", "nearest_exact", "linear", "cubic", or "linear_aa", "cubic_aa", "lanczos_aa" (antialiased).
        size: the length of the axis.
        out: its length after the resize.
        align_corners: whether the first and last pixels stay where they are.
        scale: the factor from the caller, which torch prefers to out / size; None without one.
        dtype: the dtype of coordinates and weights in torch.
    """

    mode: str
    size: Length
    out: Length
    align_corners: bool
    scale: float | None
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class LinearMap:
    """A matrix and which of its entries take part: torch multiplies by some that are zero, which keeps a NaN.

    Attributes:
        matrix: (after, before).
        support: bool, of the same shape; False only where the matrix is zero.
    """

    matrix: Matrix
    support: npt.NDArray[np.bool_]

    @property
    def transposed(self) -> LinearMap:
        """Its gradient."""
        return LinearMap(self.matrix.T, self.support.T)

    @property
    def is_identity(self) -> bool:
        """True if the map changes nothing."""
        after, before = self.matrix.shape
        return after == before and bool(
            (self.support == np.eye(after, dtype=np.bool_)).all() and (self.matrix.diagonal() == 1).all()
        )

    def taps(self) -> tuple[npt.NDArray[np.int64], Matrix, npt.NDArray[np.bool_]]:
        """(columns, weights, which of them count) of each row's entries, each (after, longest row)."""
        longest = max(int(self.support.sum(axis=1).max()), 1)
        columns = np.argsort(~self.support, axis=1, kind="stable")[:, :longest]
        return columns, np.take_along_axis(self.matrix, columns, 1), np.take_along_axis(self.support, columns, 1)


@functools.lru_cache(maxsize=256)
def source_index(axis: Resize[int]) -> npt.NDArray[np.int64]:
    """Find the index, (out,), that each output of a nearest mode takes, as torch's CPU kernel rounds it."""
    function = aten.upsample_nearest1d if axis.mode == "nearest" else aten._upsample_nearest_exact1d
    with real_kernels():
        places = torch.arange(axis.size, dtype=axis.dtype).reshape(1, 1, -1)
        index: npt.NDArray[np.int64] = function(places, [axis.out], axis.scale).flatten().to(torch.int64).numpy()
    return index


@functools.lru_cache(maxsize=64)
def resize_map(axis: Resize[int]) -> LinearMap:
    """Find the images of the unit vectors under a resize."""
    if axis.mode.startswith("nearest"):
        matrix = np.eye(axis.size)[source_index(axis)]
        return LinearMap(matrix, matrix != 0)
    with real_kernels():
        units = torch.eye(axis.size, dtype=axis.dtype)
        matrix = _resized(units, axis).double().numpy()
        support = _resized(torch.where(units == 1, torch.nan, 0.0).to(axis.dtype), axis).isnan().numpy()
    return LinearMap(matrix, support)


def _resized(rows: torch.Tensor, axis: Resize[int]) -> torch.Tensor:
    count = len(rows)
    if axis.mode == "linear":
        found = aten.upsample_linear1d(rows.reshape(count, 1, -1), [axis.out], axis.align_corners, axis.scale)
    else:
        planes = rows.reshape(count, 1, 1, -1)
        found = getattr(aten, _PLANES[axis.mode])(planes, [1, axis.out], axis.align_corners, None, axis.scale)
    result: torch.Tensor = found.reshape(count, axis.out).T
    return result


_PLANES = {
    "cubic": "upsample_bicubic2d",
    "linear_aa": "_upsample_bilinear2d_aa",
    "cubic_aa": "_upsample_bicubic2d_aa",
    "lanczos_aa": "_upsample_lanczos2d_aa",
}


def apply_maps(
    ctx: LoweringContext, value: ir.Value, leading: int, sizes: Sequence[int], maps: Sequence[LinearMap]
) -> ir.Value:
    """Resize each of `sizes` of a value (*leading dimensions, *sizes), which may not be empty.

    The CPU uses dense matmuls, unless they would spread infinite or NaN entries. Otherwise it is computed per entry.
    """
    axes = [axis for axis, one in enumerate(maps) if not one.is_identity]
    axes.sort(key=lambda axis: maps[axis].matrix.shape[0] / sizes[axis])
    if not axes:
        return value
    sparse = functools.partial(_sparse, ctx, value, leading, axes, maps)
    if not ctx.target.facts.prefers_dense_products or any(max(maps[axis].matrix.shape) > _DENSE for axis in axes):
        return sparse(ctx.op)[0]
    dense = functools.partial(_dense, ctx, value, leading, axes, sizes, maps)
    return if_finite(ctx, value, dense, sparse)[0]


def _dense(
    ctx: LoweringContext,
    value: ir.Value,
    leading: int,
    axes: Sequence[int],
    sizes: Sequence[int],
    maps: Sequence[LinearMap],
    op: OpBuilder,
) -> list[ir.Value]:
    dtype = value.dtype
    assert dtype is not None
    kept = list(sizes)
    for axis in axes:
        matrix, behind = maps[axis].matrix, len(sizes) - 1 - axis
        if behind == 0:
            value = op.MatMul(value, ctx.builder.constant(matrix.T, dtype))
        else:
            factor = ctx.builder.constant(matrix, dtype)
            value = value if behind == 1 else op.Reshape(value, [*[0] * leading, *kept[: axis + 1], -1])
            value = op.MatMul(factor, value)
        kept[axis] = len(matrix)
        value = op.Reshape(value, [*[0] * leading, *kept]) if behind > 1 else value
    return [value]


def _sparse(
    ctx: LoweringContext, value: ir.Value, leading: int, axes: Sequence[int], maps: Sequence[LinearMap], op: OpBuilder
) -> list[ir.Value]:
    dtype = value.dtype
    assert dtype is not None
    for axis in axes:
        columns, weights, counts = maps[axis].taps()
        place, shape = leading + axis, (*columns.shape, *[1] * (len(maps) - 1 - axis))
        found = op.Gather(value, ctx.builder.constant(columns, ir.DataType.INT64), axis=place)
        found = op.Mul(found, ctx.builder.constant(weights.reshape(shape), dtype))
        if not counts.all():
            found = op.Where(ctx.builder.constant(counts.reshape(shape), ir.DataType.BOOL), found, 0.0)
        value = op.ReduceSum(found, [place + 1], keepdims=0)
    return [value]
