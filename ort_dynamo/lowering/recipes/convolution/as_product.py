"""Writes a convolution and its gradients as matmuls over patches, for dtypes that Conv has no kernel for.

With groups, a weight is (groups, A, B, *kernel): a convolution takes B channels to A, a transposed one A to B.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import onnx_ir as ir

from ort_dynamo.lowering.context import LoweringContext, Size
from ort_dynamo.lowering.recipes.convolution.form import ConvolutionForm
from ort_dynamo.lowering.recipes.patches import fold, patches

__all__ = ["MatrixConvolution"]


@dataclass(frozen=True)
class MatrixConvolution:
    """A kernel on an image (N, groups * B, *sizes), where it takes `out` positions.

    Attributes:
        batch: N.
    """

    ctx: LoweringContext
    form: ConvolutionForm
    batch: Size
    sizes: tuple[Size, ...]
    out: tuple[Size, ...]

    @property
    def _heights(self) -> tuple[int, int]:
        """A and B * prod(kernel)."""
        return self.form.weight[0] // self.form.groups, math.prod(self.form.weight[1:])

    @property
    def _channels(self) -> int:
        """Number of channels of the image."""
        return self.form.groups * self.form.weight[1]

    def _columns(self, image: ir.Value) -> ir.Value:
        """Return the patches, (N, groups, B * prod(kernel), prod(out))."""
        window = self.form.sliding(self.sizes, self.out)
        found = patches(self.ctx, image, [self.batch, self._channels], window)
        return self.ctx.op.Reshape(found, [0, self.form.groups, self._heights[1], -1])

    def convolve(self, image: ir.Value, weight: ir.Value) -> ir.Value:
        """Convolve; the result is (N, groups * A, *out)."""
        op = self.ctx.op
        matrices = op.Reshape(weight, [self.form.groups, *self._heights])
        result = op.MatMul(matrices, self._columns(image))
        return self.ctx.reshape(result, [self.batch, self.form.weight[0], *self.out])

    def transpose(self, value: ir.Value, weight: ir.Value) -> ir.Value:
        """Transpose the convolution of `value` (N, groups * A, *out).

        The result is the image to which each entry adds its multiple of the kernel.
        """
        op, form = self.ctx.op, self.form
        matrices = op.Transpose(op.Reshape(weight, [form.groups, *self._heights]), perm=[0, 2, 1])
        columns = op.MatMul(matrices, op.Reshape(value, [0, form.groups, self._heights[0], -1]))
        leading = [self.batch, self._channels]
        columns = self.ctx.reshape(columns, [*leading, *form.kernel, *self.out])
        return fold(self.ctx, columns, leading, form.sliding(self.sizes, self.out))

    def correlate(self, image: ir.Value, value: ir.Value) -> ir.Value:
        """Correlate an image with `value` (N, groups * A, *out): the sum over positions, (groups * A, B, *kernel)."""
        op, form = self.ctx.op, self.form
        height, width = self._heights
        rows = op.Transpose(op.Reshape(value, [0, form.groups, height, -1]), perm=[1, 2, 0, 3])
        columns = op.Transpose(self._columns(image), perm=[1, 0, 3, 2])
        product = op.MatMul(op.Reshape(rows, [0, 0, -1]), op.Reshape(columns, [form.groups, -1, width]))
        return op.Reshape(product, form.weight)
