"""Memory layouts of the results of torch's CPU kernels: the one table, for capture and for passes.

Fake tensors promise strides, too, and for some operators other ones. `tests/torch_internals/test_kernel_layouts.py`
runs each operator of each table on real tensors.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ort_dynamo.torch_internals.kernels.operators import (
    OpOverload,
    aten,
    is_absent,
    is_mutable,
    is_pointwise,
    namespace,
    present,
)

__all__ = [
    "BROADCAST",
    "CONTIGUOUS",
    "CONVOLUTIONS",
    "IMAGE_OPERATORS",
    "LAID_OUT_AS",
    "ONEDNN_DTYPES",
    "convolves_in_onednn",
    "follows_layout",
]

LAID_OUT_AS: Mapping[OpOverload, int] = present(
    {
        aten.elu_backward.default: 0,
        aten.hardsigmoid_backward.default: 0,
        aten.hardswish_backward.default: 0,
        aten.hardtanh_backward.default: 0,
        aten.logit_backward.default: 0,
        aten.native_batch_norm_backward.default: 1,
        aten.batch_norm_backward.default: 1,
    }
)
"""Operator -> the index of the argument that decides the layout of the result, where operands of one shape differ.

Fake tensors take another argument's layout for some of them.
"""

BROADCAST: frozenset[OpOverload] = frozenset(
    present(
        dict.fromkeys(
            (
                *(aten.floor_divide.default, aten.div.Tensor_mode, aten.copysign.Tensor, aten.heaviside.default),
                *(aten.xlogy.Tensor, aten.special_xlog1py.default, aten.logaddexp.default, aten.logaddexp2.default),
                *(aten.logical_and.default, aten.logical_or.default, aten.logical_xor.default),
            )
        )
    )
)
"""Pointwise operators whose result has the layout of a sum of the operands; fake tensors use another operand's."""

CONTIGUOUS: frozenset[OpOverload] = frozenset(
    present(dict.fromkeys((aten.pow.Scalar, aten.float_power.Scalar, aten.log_sigmoid_forward.default)))
)
"""Operators whose result is contiguous for any layout of the operand. Fake tensors follow the operand."""

ONEDNN_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes in which oneDNN convolves. Torch's own kernels, of float64, give contiguous results."""

_mkldnn = namespace("mkldnn")
_PROCESSOR_CHECKS = {
    torch.bfloat16: _mkldnn._is_mkldnn_bf16_supported.default,
    torch.float16: _mkldnn._is_mkldnn_fp16_supported.default,
}


def convolves_in_onednn(dtype: torch.dtype) -> bool:
    """Check whether oneDNN convolves in a dtype on this processor.

    Half dtypes need instructions that not every processor has. Otherwise torch's own kernels convolve, and the layout
    of their results depends on sizes.
    """
    check = _PROCESSOR_CHECKS.get(dtype)
    return dtype in ONEDNN_DTYPES if check is None or is_absent(check) else bool(check())


CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)

IMAGE_OPERATORS: frozenset[object] = frozenset(
    {
        *CONVOLUTIONS,
        aten._native_batch_norm_legit_functional.default,
        aten._native_batch_norm_legit.no_stats,
        aten._native_batch_norm_legit_no_training.default,
        aten._batch_norm_with_update_functional.default,
        aten.native_batch_norm.default,
        aten.native_batch_norm_backward.default,
        aten.batch_norm_backward.default,
        aten.native_group_norm.default,
        aten.native_group_norm_backward.default,
        aten._prelu_kernel.default,
        aten._prelu_kernel_backward.default,
        aten.max_pool2d_with_indices.default,
        aten.max_pool2d_with_indices_backward.default,
        aten.avg_pool2d.default,
        aten.avg_pool2d_backward.default,
        aten._adaptive_avg_pool2d.default,
        aten._adaptive_avg_pool2d_backward.default,
        aten.upsample_nearest2d.vec,
        aten.upsample_nearest2d.default,
        aten.upsample_nearest2d_backward.default,
        aten.upsample_bilinear2d.vec,
        aten.upsample_bilinear2d.default,
        aten.upsample_bilinear2d_backward.default,
        aten.mean.default,
        aten.mean.dim,
        aten.sum.default,
        aten.sum.dim_IntList,
        aten.cat.default,
        aten.constant_pad_nd.default,
    }
)
"""Operators beside the pointwise ones: their kernels give four-dimensional results in channels_last if all images are.

An image is a four-dimensional operand other than a convolution's weight. A result of fewer dimensions, such as a sum,
has the strides that fake tensors promise. A convolution keeps the promise with oneDNN, in the dtypes that it computes.
"""

_SEVERAL_KERNELS = frozenset(
    present(
        dict.fromkeys((aten.angle.default, aten.ldexp.Tensor, aten.mvlgamma.default, aten.rrelu.default)),
    )
)
"""Pointwise operators that call others, whose results have layouts of their own."""

_POINTWISE_WITHOUT_TAG = frozenset(
    {
        aten.elu_backward.default,
        aten.hardswish_backward.default,
        aten.hardtanh_backward.default,
        aten.leaky_relu_backward.default,
    }
)


def follows_layout(target: object) -> bool:
    """Check whether a pointwise operator's results have its operands' layout, if the operands have one dense layout.

    Operands that are broadcast do not count if their own strides are in the same order. The promise is: if the fake
    result has the layout, the real one has it.
    """
    if not isinstance(target, OpOverload) or is_mutable(target) or target in CONTIGUOUS | _SEVERAL_KERNELS:
        return False
    return is_pointwise(target) or target in _POINTWISE_WITHOUT_TAG
