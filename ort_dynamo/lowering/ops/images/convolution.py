"""Convolution and transposed convolution in one, two and three dimensions, with their gradients."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir
import torch

from ort_dynamo.graph.dtypes import onnx_dtype
from ort_dynamo.lowering.context import LoweringContext, Size, is_empty
from ort_dynamo.lowering.recipes.convolution.as_product import MatrixConvolution
from ort_dynamo.lowering.recipes.convolution.form import ConvolutionForm, convolution_form, convolution_steps
from ort_dynamo.lowering.recipes.convolution.symbolic import SymbolicConvolution
from ort_dynamo.lowering.recipes.promotion import float_dtype
from ort_dynamo.lowering.recipes.sums.channel_sum import channel_sum
from ort_dynamo.lowering.recipes.windows import fixed
from ort_dynamo.lowering.registry import lowering
from ort_dynamo.torch_internals.kernels.operators import aten


@lowering(aten.convolution.default)
def convolution(
    ctx: LoweringContext,
    input: ir.Value,
    weight: ir.Value,
    bias: ir.Value | None,
    stride: Sequence[Size],
    padding: Sequence[Size],
    dilation: Sequence[Size],
    transposed: bool,
    output_padding: Sequence[Size],
    groups: Size,
) -> ir.Value:
    """convolution(Tensor input, Tensor weight, Tensor? bias, SymInt[] stride, SymInt[] padding, SymInt[] dilation,
    bool transposed, SymInt[] output_padding, SymInt groups) -> Tensor
    """
    op = ctx.op
    if is_empty(ctx.out.shape):
        return _zeros(ctx, ctx.out)
    if is_empty(ctx.sizes(input)):
        raise ctx.refuse("convolution with 0 channels")
    steps = convolution_steps(ctx, weight, stride, padding, dilation, transposed, output_padding, groups)
    if (symbolic := SymbolicConvolution.of(ctx, weight, steps)) is not None:
        return symbolic.forward(input, weight, bias)
    form = convolution_form(ctx, weight, steps)
    if not _has_kernel(ctx, ctx.out.dtype):
        return _by_matrices(ctx, form, input, weight, bias)
    if not transposed:
        return op.Conv(input, weight, bias, **form.attributes)
    if not form.reaches_stride:
        return op.ConvTranspose(input, weight, bias, output_padding=form.output_padding, **form.attributes)
    # ONNX Runtime takes an output padding below the stride only. Less padding at the end gives the same positions, and
    # positions beyond all windows are nothing but bias.
    pads = zip(form.padding, form.output_padding, strict=True)
    ends, extra = zip(*((max(p - e, 0), max(e - p, 0)) for p, e in pads), strict=True)
    beyond = [max(e - s + 1, 0) for e, s in zip(extra, form.stride, strict=True)]
    attributes = form.attributes | {"pads": [*form.padding, *ends]}
    attributes["output_padding"] = [e - more for e, more in zip(extra, beyond, strict=True)]
    if not any(beyond):
        return op.ConvTranspose(input, weight, bias, **attributes)
    result = op.Pad(op.ConvTranspose(input, weight, **attributes), [0] * (len(beyond) + 4) + beyond)
    return _plus_bias(ctx, result, bias, len(form.weight))


def _has_kernel(ctx: LoweringContext, dtype: torch.dtype) -> bool:
    """Check whether ONNX Runtime has a convolution of `dtype`, or of a wider dtype to compute it in."""
    return ctx.target.takes("Conv", "", {"T": onnx_dtype(float_dtype(dtype))})


def _by_matrices(
    ctx: LoweringContext, form: ConvolutionForm, input: ir.Value, weight: ir.Value, bias: ir.Value | None
) -> ir.Value:
    sizes, out = ctx.sizes(input), tuple(ctx.out.shape)
    if form.transposed:
        result = MatrixConvolution(ctx, form, sizes[0], out[2:], sizes[2:]).transpose(input, weight)
    else:
        result = MatrixConvolution(ctx, form, sizes[0], sizes[2:], out[2:]).convolve(input, weight)
    return _plus_bias(ctx, result, bias, len(form.weight))


def _plus_bias(ctx: LoweringContext, result: ir.Value, bias: ir.Value | None, rank: int) -> ir.Value:
    op = ctx.op
    return result if bias is None else op.Add(result, op.Reshape(bias, [-1, *[1] * (rank - 2)]))


@lowering(aten.convolution_backward.default)
def convolution_backward(
    ctx: LoweringContext,
    grad_output: ir.Value,
    input: ir.Value,
    weight: ir.Value,
    bias_sizes: Sequence[Size] | None,
    stride: Sequence[Size],
    padding: Sequence[Size],
    dilation: Sequence[Size],
    transposed: bool,
    output_padding: Sequence[Size],
    groups: Size,
    output_mask: Sequence[bool],
) -> tuple[ir.Value | None, ...]:
    """convolution_backward(Tensor grad_output, Tensor input, Tensor weight, SymInt[]? bias_sizes, SymInt[] stride,
    SymInt[] padding, SymInt[] dilation, bool transposed, SymInt[] output_padding, SymInt groups, bool[3] output_mask)
    -> (Tensor, Tensor, Tensor)
    """
    wanted = [bool(mask) and index in ctx.used for index, mask in enumerate(output_mask)]
    if is_empty(ctx.sizes(grad_output)):
        return tuple(_zeros(ctx, fake) if want else None for fake, want in zip(ctx.out, wanted, strict=True))
    if is_empty(ctx.sizes(input)):
        raise ctx.refuse("convolution with 0 channels")
    dtype = _compute_dtype(ctx, ctx.dtype(grad_output))
    grad, image, filters = (ctx.cast(value, dtype) for value in (grad_output, input, weight))
    steps = convolution_steps(ctx, weight, stride, padding, dilation, transposed, output_padding, groups)
    grad_sizes, sizes = ctx.sizes(grad_output), ctx.sizes(input)
    grad_input = grad_weight = None
    if (symbolic := SymbolicConvolution.of(ctx, weight, steps)) is not None:
        grad_input = symbolic.of_input(grad, filters, sizes) if wanted[0] else None
        grad_weight = symbolic.of_weight(grad, image, grad_sizes, sizes, ctx.sizes(weight)) if wanted[1] else None
    else:
        form = convolution_form(ctx, weight, steps)
        gradient = _Gradient(ctx, form, grad, image, filters, grad_sizes, sizes)
        grad_input = gradient.of_input() if wanted[0] else None
        grad_weight = gradient.of_weight() if wanted[1] else None
    results = (grad_input, grad_weight, channel_sum(ctx, grad, grad_sizes) if wanted[2] else None)
    return tuple(
        None if value is None else ctx.cast(value, fake.dtype) for value, fake in zip(results, ctx.out, strict=True)
    )


def _compute_dtype(ctx: LoweringContext, dtype: torch.dtype) -> torch.dtype:
    """float16 and bfloat16 stay where the provider convolves them; else the whole gradient is computed in float32."""
    return dtype if ctx.target.takes("Conv", "", {"T": onnx_dtype(dtype)}) else float_dtype(dtype)


def _zeros(ctx: LoweringContext, fake: torch.Tensor) -> ir.Value:
    return ctx.op.Expand(ctx.constant(0, fake.dtype), ctx.shape(fake.shape))


@dataclass(frozen=True)
class _Gradient:
    """The gradients of one convolution; all values share one dtype.

    With grad (N, out, *m), input (N, in, *n) and weight (out, in / groups, *k), in one dimension and one group:
        grad_input[i, t * s + j * d - p] += sum over o of grad[o, t] * weight[o, i, j]
        grad_weight[o, i, j] = sum over t of grad[o, t] * input[i, t * s + j * d - p]
    A transposed convolution is the first line. So its gradients are a convolution, and the second line with grad and
    input exchanged.
    """

    ctx: LoweringContext
    form: ConvolutionForm
    grad: ir.Value
    input: ir.Value
    weight: ir.Value
    grad_sizes: tuple[Size, ...]
    input_sizes: tuple[Size, ...]

    def of_input(self) -> ir.Value:
        op, form = self.ctx.op, self.form
        sizes = self.input_sizes[2:]
        if not self._has_kernel:
            matrices = self._matrices
            return (matrices.convolve if form.transposed else matrices.transpose)(self.grad, self.weight)
        if form.transposed:
            result = op.Conv(self.grad, self.weight, **form.attributes)
            return self._cropped(result, sizes) if form.reaches_stride else result
        if self._prefers_products and set(form.stride) == {1} and self._fits_inside() and not self._weight_outweighs:
            return self._of_input_by_conv()
        if self._has_conv_grad:
            return self._conv_grad(0)
        remainders = fixed(form.remainders(sizes, self.grad_sizes[2:]))
        if remainders is not None:
            return op.ConvTranspose(self.grad, self.weight, output_padding=remainders, **form.attributes)
        most = [s - 1 for s in form.stride]
        return self._cropped(op.ConvTranspose(self.grad, self.weight, output_padding=most, **form.attributes), sizes)

    def of_weight(self) -> ir.Value:
        form = self.form
        if not self._has_kernel:
            both = (self.grad, self.input) if form.transposed else (self.input, self.grad)
            return self._matrices.correlate(*both)
        if form.transposed:
            if self._has_conv_grad and not form.reaches_stride:
                return self._conv_grad(1)
            image, filters, sizes, out = self.grad, self.input, self.grad_sizes, self.input_sizes
        else:
            if self._has_conv_grad:
                return self._conv_grad(1)
            image, filters, sizes, out = self.input, self.grad, self.input_sizes, self.grad_sizes
        remainders = form.remainders(sizes[2:], out[2:])
        # The swapped convolution multiplies matrices of prod(kernel) columns, the other form ones of in / groups.
        swaps = self._prefers_products and math.prod(form.kernel) > max(form.weight[1], 16)
        if swaps or (self.ctx.target.facts.weighs_by_convolution and math.prod(form.kernel) > 1):
            return self._of_weight_by_conv(image, filters, sizes, remainders)
        return self._of_weight_by_offsets(image, filters, remainders)

    # -- forms ---------------------------------------------------------------------------------------------------

    @property
    def _prefers_products(self) -> bool:
        return self.ctx.target.facts.prefers_dense_products

    @property
    def _has_kernel(self) -> bool:
        return self.ctx.target.takes("Conv", "", {"T": self.grad.dtype or ir.DataType.UNDEFINED})

    @property
    def _matrices(self) -> MatrixConvolution:
        sizes, out = self.input_sizes, self.grad_sizes
        if self.form.transposed:
            sizes, out = out, sizes
        return MatrixConvolution(self.ctx, self.form, sizes[0], sizes[2:], out[2:])

    @property
    def _has_conv_grad(self) -> bool:
        target, form = self.ctx.target, self.form
        if target.has_defect("conv_grad_of_groups") and form.groups > 1 and len(form.kernel) != 2:
            return False
        return target.takes("ConvGrad", "com.microsoft", {"T": self.grad.dtype or ir.DataType.UNDEFINED})

    def _conv_grad(self, index: int) -> ir.Value:
        """Return the training build's kernel; `index` 0 for the input, 1 for the weight."""
        image, filters = (self.grad, self.input) if self.form.transposed else (self.input, self.grad)
        outputs = [ir.Value(name="") for _ in range(index)] + [ir.Value(name=f"{self.ctx.node.name}_gradient_{index}")]
        found = self.ctx.contrib.ConvGrad(filters, image, self.weight, _outputs=outputs, **self.form.attributes)
        return found if index == 0 else found[index]

    @property
    def _weight_outweighs(self) -> bool:
        """True if the weight has more elements than the gradient: mirroring it then takes longer than Conv saves.

        Conv takes 0.8 of the other kernels' time at 64 channels of 56 x 56 positions, 1.4 at 256 channels of 4 x 4.
        """
        sizes = fixed(self.grad_sizes)
        return sizes is not None and math.prod(self.form.kernel) > 1 and math.prod(self.form.weight) > math.prod(sizes)

    def _fits_inside(self) -> bool:
        return all(p <= reach for p, reach in zip(self.form.padding, self.form.reach, strict=True))

    def _of_input_by_conv(self) -> ir.Value:
        """With stride 1, the gradient is a convolution with the mirrored weight, channels swapped: Conv is the faster
        kernel.
        """
        op, form = self.ctx.op, self.form
        out, inner, *kernel = form.weight
        rest = list(range(3, 3 + len(kernel)))
        turned = op.Reshape(self.weight, [form.groups, out // form.groups, inner, *kernel])
        turned = op.Reshape(op.Transpose(turned, perm=[0, 2, 1, *rest]), [form.groups * inner, -1, *kernel])
        if max(kernel) > 1:
            backwards = [-1] * len(kernel)
            turned = op.Slice(turned, backwards, [-sys.maxsize] * len(kernel), form.axes, backwards)
        pads = [reach - p for reach, p in zip(form.reach, form.padding, strict=True)]
        return op.Conv(
            self.grad, turned, pads=pads * 2, dilations=form.dilation, group=form.groups, kernel_shape=kernel
        )

    def _of_weight_by_conv(
        self, image: ir.Value, filters: ir.Value, sizes: Sequence[Size], remainders: Sequence[Size]
    ) -> ir.Value:
        """Return a convolution of `image` with `filters`, batch and channels swapped, stride and dilation swapped."""
        op, form = self.ctx.op, self.form
        inner, *kernel = form.weight[1:]
        rest = list(range(2, 2 + len(kernel)))
        if form.groups > 1:
            split = self.ctx.reshape(image, [sizes[0], form.groups, inner, *sizes[2:]])
            split = op.Transpose(split, perm=[2, 1, 0, *(axis + 1 for axis in rest)])
            image = self.ctx.reshape(split, [inner, form.groups * sizes[0], *sizes[2:]])
        else:
            image = op.Transpose(image, perm=[1, 0, *rest])
        filters = op.Transpose(filters, perm=[1, 0, *rest])
        found = op.Conv(
            image, filters, strides=form.dilation, dilations=form.stride, pads=form.padding * 2, group=form.groups
        )
        known = fixed(remainders)
        if known is None or any(r >= d for r, d in zip(known, form.dilation, strict=True)):
            found = self._cropped(found, kernel)
        return op.Transpose(found, perm=[1, 0, *rest])

    def _of_weight_by_offsets(self, image: ir.Value, filters: ir.Value, remainders: Sequence[Size]) -> ir.Value:
        """One matmul per position of the kernel, between `filters` and the part of `image` under that position."""
        op, form = self.ctx.op, self.form
        out, inner, *kernel = form.weight
        order = [1, 0, *range(2, 2 + len(kernel))]
        image = self._padded(op.Transpose(image, perm=order), remainders)
        filters = op.Transpose(filters, perm=order)
        depthwise = inner == out // form.groups == 1
        groups = [form.groups] if form.groups > 1 else []
        if not depthwise:
            filters = op.Reshape(filters, [*groups, out // form.groups, -1])
        found = []
        for offset in itertools.product(*map(range, kernel)):
            part = self._under(image, offset)
            if depthwise:
                product = op.Reshape(op.Mul(part, filters), [out, -1])
                found.append(op.ReduceSum(product, [1], keepdims=1))
            else:
                product = _times_transposed(self.ctx, filters, op.Reshape(part, [*groups, inner, -1]))
                found.append(op.Reshape(product, [out * inner, 1]))
        return op.Reshape(op.Concat(*found, axis=1) if len(found) > 1 else found[0], form.weight)

    def _padded(self, image: ir.Value, remainders: Sequence[Size]) -> ir.Value:
        """`image` with its padding and without the last positions, which no window reaches."""
        padding = self.form.padding
        ends = [p - r for p, r in zip(padding, remainders, strict=True)]
        if not any(padding) and fixed(ends) == [0] * len(ends):
            return image
        return self.ctx.op.Pad(image, self.ctx.shape([0, 0, *padding, 0, 0, *ends]))

    def _under(self, image: ir.Value, offset: Sequence[int]) -> ir.Value:
        """Return the positions of the padded image that the kernel's position `offset` visits."""
        form = self.form
        starts = [o * d for o, d in zip(offset, form.dilation, strict=True)]
        ends = [start - reach or sys.maxsize for start, reach in zip(starts, form.reach, strict=True)]
        if not any(form.reach) and set(form.stride) == {1}:
            return image
        return self.ctx.op.Slice(image, starts, ends, form.axes, form.stride)

    def _cropped(self, value: ir.Value, sizes: Sequence[Size]) -> ir.Value:
        """Return the first `sizes` positions of the spatial dimensions."""
        axes = self.form.axes
        return self.ctx.op.Slice(value, [0] * len(axes), self.ctx.shape(sizes), axes)


def _times_transposed(ctx: LoweringContext, a: ir.Value, b: ir.Value) -> ir.Value:
    """Compute a @ b.T over the last two dimensions."""
    if ctx.has_fused_matmul(a):
        return ctx.contrib.FusedMatMul(a, b, transB=1)
    return ctx.op.MatMul(a, ctx.op.Einsum(b, equation="...ij->...ji"))
