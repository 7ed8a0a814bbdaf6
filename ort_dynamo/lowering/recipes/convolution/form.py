"""Reads the constants of a convolution off ATen's arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from ort_dynamo.lowering.context import LoweringContext, Size
from ort_dynamo.lowering.recipes.windows import Sliding

__all__ = ["ConvolutionForm", "ConvolutionSteps", "convolution_form", "convolution_steps"]


@dataclass(frozen=True)
class ConvolutionSteps:
    """The steps of a convolution's kernel, of any size: one number for each spatial dimension."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    output_padding: list[int]
    groups: int
    transposed: bool

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes of the ONNX operators Conv, ConvTranspose and ConvGrad."""
        return {"strides": self.stride, "pads": self.padding * 2, "dilations": self.dilation, "group": self.groups}


@dataclass(frozen=True)
class ConvolutionForm(ConvolutionSteps):
    """The constants of a convolution whose weight has a known shape.

    Attributes:
        weight: shape of the weight, (out, in / groups, *kernel); transposed, (in, out / groups, *kernel).
    """

    weight: list[int]

    @property
    def kernel(self) -> list[int]:
        """Its size in each spatial dimension."""
        return self.weight[2:]

    @property
    def axes(self) -> list[int]:
        """The spatial dimensions."""
        return list(range(2, len(self.weight)))

    @property
    def reach(self) -> list[int]:
        """From the first to the last position under the kernel."""
        return [d * (k - 1) for d, k in zip(self.dilation, self.kernel, strict=True)]

    @property
    def attributes(self) -> dict[str, Any]:
        """The same, with the kernel's size."""
        return {**super().attributes, "kernel_shape": self.kernel}

    def sliding(self, sizes: Sequence[Size], out: Sequence[Size]) -> Sliding:
        """Return the kernel as a window that takes `out` positions on an image of `sizes`."""
        return Sliding(self.kernel, self.stride, self.padding, self.dilation, tuple(sizes), tuple(out))

    @property
    def reaches_stride(self) -> bool:
        """True if the output padding makes room for one more window, as a dilation allows."""
        return any(extra >= s for extra, s in zip(self.output_padding, self.stride, strict=True))

    def remainders(self, sizes: Sequence[Size], out: Sequence[Size]) -> list[Size]:
        """Count, in each dimension, the last positions of the padded input that no window reaches."""
        return self.sliding(sizes, out).remainders


def convolution_steps(
    ctx: LoweringContext,
    weight: ir.Value,
    stride: Sequence[Size],
    padding: Sequence[Size],
    dilation: Sequence[Size],
    transposed: bool,
    output_padding: Sequence[Size],
    groups: Size,
) -> ConvolutionSteps:
    """Read the steps off ATen's arguments, in which a single integer is repeated for all dimensions.

    Raises:
        UnsupportedNodeError: one of them is symbolic.
    """

    def each(numbers: Sequence[Size], what: str) -> list[int]:
        known = ctx.static(numbers, what)
        return known * (ctx.rank(weight) - 2) if len(known) == 1 else known

    return ConvolutionSteps(
        each(stride, "the stride"),
        each(padding, "the padding"),
        each(dilation, "the dilation"),
        each(output_padding, "the output padding"),
        ctx.static([groups], "the number of groups")[0],
        transposed,
    )


def convolution_form(ctx: LoweringContext, weight: ir.Value, steps: ConvolutionSteps) -> ConvolutionForm:
    """Join the steps and the shape of `weight`, which is known.

    Raises:
        UnsupportedNodeError: torch's kernel rejects the output padding.
    """
    form = ConvolutionForm(**vars(steps), weight=ctx.static(ctx.sizes(weight), "the shape of the weight"))
    sizes = zip(form.output_padding, form.stride, form.dilation, strict=True)
    if form.transposed and any(extra >= max(others) for extra, *others in sizes):
        raise ctx.refuse("output_padding is not smaller than stride or dilation")
    return form
