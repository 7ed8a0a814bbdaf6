"""Normalisations by statistics of the data, or kept ones."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ort_dynamo.onnx_module.host_values import Statistic
from ort_dynamo.onnx_module.registry import MICROSOFT, onnx_operator

__all__: list[str] = []


def _update(kept: Tensor, seen: Tensor, momentum: float, in_place: bool) -> Tensor:
    """ONNX's running statistic: kept·momentum + seen·(1 − momentum)."""
    found = (kept * momentum + seen * (1 - momentum)).to(kept.dtype)
    if in_place:
        kept.copy_(found)
    return found


def _normalise(
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    mean: Tensor,
    var: Tensor,
    epsilon: float,
    momentum: float,
    by_batch: bool,
    in_place: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    # torch's backward on CPU reads beyond expanded tensors.
    scale, bias = scale.contiguous(), bias.contiguous()
    if not by_batch:
        mean, var = mean.contiguous(), var.contiguous()
        return F.batch_norm(x, mean, var, scale, bias, False, 0.0, epsilon), mean, var
    axes = [axis for axis in range(x.dim()) if axis != 1]
    with torch.no_grad():
        # Population variance, as ONNX says; torch keeps that of a sample.
        seen_var, seen_mean = torch.var_mean(x.to(mean.dtype), axes, correction=0)
        new_mean = _update(mean, seen_mean, momentum, in_place)
        new_var = _update(var, seen_var, momentum, in_place)
    # that of torch.nn.functional refuses one value per channel
    found = torch.batch_norm(x, scale, bias, None, None, True, 0.0, epsilon, torch.backends.cudnn.enabled)
    return found, new_mean, new_var


@onnx_operator("BatchNormalization")
def batch_norm_by_outputs(
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    mean: Statistic,
    var: Statistic,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    spatial: Literal[1] = 1,
    training: bool,
    outputs: int,
    in_place: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Before version 14 it normalised by the batch where more than one output was named."""
    found = _normalise(x, scale, bias, mean, var, epsilon, momentum, training and outputs > 1, in_place)
    return (*found, found[1], found[2])


@onnx_operator("BatchNormalization", 14)
def batch_norm(
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    mean: Statistic,
    var: Statistic,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    training_mode: int = 0,
    training: bool,
    in_place: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise (N, C, …) by channel, and give the running statistics.

    If `training_mode` is set and the module is in train mode, it uses the batch statistics and updates the running
    ones. Otherwise it uses the running statistics.
    """
    return _normalise(x, scale, bias, mean, var, epsilon, momentum, training and bool(training_mode), in_place)


@onnx_operator("InstanceNormalization")
def instance_norm(x: Tensor, scale: Tensor, bias: Tensor, *, epsilon: float = 1e-5) -> Tensor:
    """Normalise each plane of (N, C, …)."""
    # that of torch.nn.functional refuses one element
    return torch.instance_norm(x, scale, bias, None, None, True, 0.0, epsilon, torch.backends.cudnn.enabled)


@onnx_operator("GroupNormalization", 18)
def group_norm_by_group(x: Tensor, scale: Tensor, bias: Tensor, *, epsilon: float = 1e-5, num_groups: int) -> Tensor:
    """Normalise groups of channels, with a scale and a bias for each group."""
    each = x.shape[1] // num_groups
    wide = [torch.reshape(torch.unsqueeze(one, 1).expand(num_groups, each), (-1,)) for one in (scale, bias)]
    return F.group_norm(x, num_groups, wide[0], wide[1], epsilon)


@onnx_operator("GroupNormalization", 21)
def group_norm(
    x: Tensor, scale: Tensor, bias: Tensor, *, epsilon: float = 1e-5, num_groups: int, stash_type: int = 1
) -> Tensor:
    """Normalise groups of channels, with a scale and a bias for each channel."""
    return F.group_norm(x, num_groups, scale, bias, epsilon)


@onnx_operator("LayerNormalization")
@onnx_operator("LayerNormalization", 1, MICROSOFT)  # ONNX Runtime had it before ONNX
def layer_norm(
    x: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
    outputs: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise over the axes from one on; the mean and 1 / standard deviation are float32, as `stash_type` says."""
    axis = axis + x.dim() if axis < 0 else axis
    sizes = x.shape[axis:]
    if outputs == 1 and scale.shape == sizes and (bias is None or bias.shape == sizes):
        return F.layer_norm(x, list(sizes), scale, bias, epsilon), x, x
    axes = list(range(axis, x.dim()))
    wide = x.to(torch.float32) if x.dtype in (torch.float16, torch.bfloat16) and stash_type == 1 else x
    var, mean = torch.var_mean(wide, axes, correction=0, keepdim=True)
    inverse = torch.rsqrt(var + epsilon)
    found = ((wide - mean) * inverse).to(x.dtype) * scale
    if stash_type == 1:
        mean, inverse = mean.to(torch.float32), inverse.to(torch.float32)
    return (found if bias is None else found + bias), mean, inverse


def _rms_norm(x: Tensor, scale: Tensor, axis: int, epsilon: float) -> tuple[Tensor, Tensor]:
    axis = axis + x.dim() if axis < 0 else axis
    wide = x.to(torch.float32) if x.dtype in (torch.float16, torch.bfloat16) else x
    inverse = torch.rsqrt(torch.mean(wide * wide, list(range(axis, x.dim())), keepdim=True) + epsilon)
    return (wide * inverse).to(x.dtype) * scale, inverse


@onnx_operator("RMSNormalization", 23)
def rms_norm(x: Tensor, scale: Tensor, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1) -> Tensor:
    """Divide by the root of the mean square over the axes from one on."""
    return _rms_norm(x, scale, axis, epsilon)[0]


@onnx_operator("SimplifiedLayerNormalization", 1, MICROSOFT)
@onnx_operator("SimplifiedLayerNormalization")
def simplified_layer_norm(
    x: Tensor, scale: Tensor, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> tuple[Tensor, Tensor]:
    """Return the same, with the reciprocal of the root."""
    return _rms_norm(x, scale, axis, epsilon)


@onnx_operator("SkipLayerNormalization", 1, MICROSOFT)
def skip_layer_norm(
    x: Tensor,
    skip: Tensor,
    gamma: Tensor,
    beta: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    epsilon: float = 1e-12,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """LayerNormalization of a sum; also its mean, 1 / standard deviation, and the sum."""
    total = x + skip if bias is None else x + skip + bias
    return (*layer_norm(total, gamma, beta, epsilon=epsilon, outputs=3), total)


@onnx_operator("SkipSimplifiedLayerNormalization", 1, MICROSOFT)
def skip_simplified_layer_norm(
    x: Tensor, skip: Tensor, gamma: Tensor, bias: Tensor | None = None, *, epsilon: float = 1e-12
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """SimplifiedLayerNormalization of a sum; no mean, the reciprocal of the root, and the sum."""
    total = x + skip if bias is None else x + skip + bias
    found, inverse = _rms_norm(total, gamma, -1, epsilon)
    return found, torch.zeros_like(inverse), inverse, total


@onnx_operator("LRN")
def local_response_norm(x: Tensor, *, size: int, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0) -> Tensor:
    """x / (bias + alpha / size · sum of squares of `size` neighbouring channels) ** beta."""
    square = torch.unsqueeze(torch.reshape(x * x, (x.shape[0], x.shape[1], -1)), 1)
    before = (size - 1) // 2
    padded = F.pad(square, (0, 0, before, size - 1 - before))
    mean = torch.reshape(F.avg_pool2d(padded, (size, 1), 1), x.shape)
    return x / torch.pow(bias + alpha * mean, beta)
