"""Writes convolutions whose weight has symbolic sizes: a plain input of a graph with dynamic shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from ort_dynamo.lowering.context import LoweringContext, Size
from ort_dynamo.lowering.recipes.convolution.form import ConvolutionSteps
from ort_dynamo.lowering.recipes.windows import fixed

__all__ = ["SymbolicConvolution"]


@dataclass(frozen=True)
class SymbolicConvolution(ConvolutionSteps):
    """A convolution with a symbolic kernel size and fixed steps; the operators read the kernel off the weight."""

    ctx: LoweringContext

    @classmethod
    def of(cls, ctx: LoweringContext, weight: ir.Value, steps: ConvolutionSteps) -> SymbolicConvolution | None:
        """Make one of its steps, or None where the shape of `weight` is known.

        Raises:
            UnsupportedNodeError: the output padding reaches the stride.
        """
        if fixed(ctx.sizes(weight)) is not None:
            return None
        if any(extra >= s for extra, s in zip(steps.output_padding, steps.stride, strict=True)):
            raise ctx.refuse("output_padding is as large as the stride, and the kernel's size is symbolic")
        return cls(**vars(steps), ctx=ctx)

    def forward(self, image: ir.Value, weight: ir.Value, bias: ir.Value | None) -> ir.Value:
        """Return the convolution itself."""
        op = self.ctx.op
        if self.transposed:
            return op.ConvTranspose(image, weight, bias, output_padding=self.output_padding, **self.attributes)
        return op.Conv(image, weight, bias, **self.attributes)

    def of_input(self, grad: ir.Value, weight: ir.Value, sizes: Sequence[Size]) -> ir.Value:
        """Return the gradient of the input, of shape `sizes`."""
        op = self.ctx.op
        if self.transposed:
            return op.Conv(grad, weight, **self.attributes)
        # The stride may skip the last positions, which are not known in number: made for the most of them, and cut.
        most = [s - 1 for s in self.stride]
        return self._cut(op.ConvTranspose(grad, weight, output_padding=most, **self.attributes), sizes)

    def of_weight(
        self,
        grad: ir.Value,
        image: ir.Value,
        grad_sizes: Sequence[Size],
        image_sizes: Sequence[Size],
        shape: Sequence[Size],
    ) -> ir.Value:
        """Return the gradient of the weight, of shape `shape`.

        It is a convolution of the input with the gradient, with batch and channels swapped, and stride and dilation
        swapped. If the convolution is transposed, input and gradient are exchanged.
        """
        op, ctx = self.ctx.op, self.ctx
        filters, sizes = grad, image_sizes
        if self.transposed:
            image, filters, sizes = grad, image, grad_sizes
        rest = list(range(2, len(shape)))
        if self.groups > 1:
            split = ctx.reshape(image, [sizes[0], self.groups, shape[1], *sizes[2:]])
            split = op.Transpose(split, perm=[2, 1, 0, *(axis + 1 for axis in rest)])
            image = ctx.reshape(split, [shape[1], self.groups * sizes[0], *sizes[2:]])
        else:
            image = op.Transpose(image, perm=[1, 0, *rest])
        filters = op.Transpose(filters, perm=[1, 0, *rest])
        attributes = self.attributes | {"strides": self.dilation, "dilations": self.stride}
        return op.Transpose(self._cut(op.Conv(image, filters, **attributes), shape), perm=[1, 0, *rest])

    def _cut(self, value: ir.Value, sizes: Sequence[Size]) -> ir.Value:
        """Return the first positions of the spatial dimensions of `sizes`."""
        axes = list(range(2, len(sizes)))
        return self.ctx.op.Slice(value, [0] * len(axes), self.ctx.shape(sizes[2:]), axes)
