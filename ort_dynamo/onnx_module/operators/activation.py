"""Activations and normalisations along one axis."""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ort_dynamo.onnx_module.host_values import Host, Setting, number
from ort_dynamo.onnx_module.registry import MICROSOFT, onnx_operator

__all__: list[str] = []


@onnx_operator("LeakyRelu")
def leaky_relu(x: Tensor, *, alpha: float = 0.01) -> Tensor:
    """x where positive, else alpha·x."""
    return F.leaky_relu(x, alpha)


@onnx_operator("Elu")
def elu(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    """x where positive, else alpha·(exp(x) − 1)."""
    return F.elu(x, alpha)


@onnx_operator("Celu")
def celu(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    """x where positive, else alpha·(exp(x / alpha) − 1)."""
    return F.celu(x, alpha)


@onnx_operator("Selu")
def selu(x: Tensor, *, alpha: float = 1.6732632423543772, gamma: float = 1.0507009873554805) -> Tensor:
    """gamma times Elu."""
    return gamma * F.elu(x, alpha)


@onnx_operator("PRelu")
def prelu(x: Tensor, slope: Tensor) -> Tensor:
    """x where not negative, else slope·x, the slope broadcast to x."""
    return torch.where(x < 0, slope * x, x)


@onnx_operator("ThresholdedRelu")
def thresholded_relu(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    """x where above alpha, else 0."""
    return torch.where(x > alpha, x, torch.zeros_like(x))


@onnx_operator("HardSigmoid")
def hard_sigmoid(x: Tensor, *, alpha: float = 0.2, beta: float = 0.5) -> Tensor:
    """alpha·x + beta, within 0 and 1."""
    return torch.clamp(alpha * x + beta, 0, 1)


@onnx_operator("HardSwish")
def hard_swish(x: Tensor) -> Tensor:
    """x times HardSigmoid with alpha 1/6."""
    return F.hardswish(x)


@onnx_operator("Mish")
def mish(x: Tensor) -> Tensor:
    """x·tanh(softplus(x))."""
    return F.mish(x)


@onnx_operator("Softplus")
def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x))."""
    return F.softplus(x)


@onnx_operator("Softsign")
def softsign(x: Tensor) -> Tensor:
    """x / (1 + |x|)."""
    return F.softsign(x)


@onnx_operator("Shrink")
def shrink(x: Tensor, *, lambd: float = 0.5, bias: float = 0.0) -> Tensor:
    """Move elements beyond ±lambd towards zero by bias; the rest is 0."""
    shrunk = torch.where(x < -lambd, x + bias, torch.zeros_like(x))
    return torch.where(x > lambd, x - bias, shrunk).to(x.dtype)


@onnx_operator("Gelu", 20)
def gelu(x: Tensor, *, approximate: Literal["none", "tanh"] = "none") -> Tensor:
    """x·Φ(x), or its approximation by tanh."""
    return F.gelu(x, approximate=approximate)


@onnx_operator("Gelu", 1, MICROSOFT)
def exact_gelu(x: Tensor) -> Tensor:
    """x·Φ(x)."""
    return F.gelu(x)


@onnx_operator("BiasGelu", 1, MICROSOFT)
def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """Gelu of a sum."""
    return F.gelu(x + bias)


@onnx_operator("FastGelu", 1, MICROSOFT)
def fast_gelu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the approximation by tanh, of a sum if there is a bias."""
    return F.gelu(x if bias is None else x + bias, approximate="tanh")


@onnx_operator("QuickGelu", 1, MICROSOFT)
def quick_gelu(x: Tensor, *, alpha: float = 1.702) -> Tensor:
    """x·sigmoid(alpha·x)."""
    return x * torch.sigmoid(alpha * x)


@onnx_operator("Clip", 6)
def clip_by_attributes(x: Tensor, *, min: float = -math.inf, max: float = math.inf) -> Tensor:
    """Within two numbers."""
    return torch.clamp(x, min, max)


@onnx_operator("Clip", 11)
def clip(x: Tensor, min: Setting | None = None, max: Setting | None = None) -> Tensor:
    """Clamp to two scalars, which are both optional."""
    if min is None and max is None:
        return x
    if isinstance(min, Tensor) or isinstance(max, Tensor):
        low = x if min is None else torch.maximum(x, _scalar_tensor(min, x))
        return low if max is None else torch.minimum(low, _scalar_tensor(max, x))
    return torch.clamp(x, None if min is None else number(min), None if max is None else number(max))


def _scalar_tensor(value: Setting, like: Tensor) -> Tensor:
    if isinstance(value, Host):
        return torch.full((), number(value), dtype=like.dtype, device=like.device)
    return value.reshape(())


@onnx_operator("Softmax", 13)
def softmax(x: Tensor, *, axis: int = -1) -> Tensor:
    """Along one axis."""
    return torch.softmax(x, axis)


@onnx_operator("LogSoftmax", 13)
def log_softmax(x: Tensor, *, axis: int = -1) -> Tensor:
    """Along one axis."""
    return torch.log_softmax(x, axis)


@onnx_operator("Hardmax", 13)
def hardmax(x: Tensor, *, axis: int = -1) -> Tensor:
    """1 at the first maximum along an axis, else 0."""
    places = torch.arange(x.shape[axis], device=x.device)
    first = torch.argmax(x, axis, keepdim=True)
    shape = [1] * x.dim()
    shape[axis] = -1
    return (places.reshape(shape) == first).to(x.dtype)


def _as_matrix(x: Tensor, axis: int) -> Tensor:
    """Before version 13, the axes from `axis` on were one."""
    axis = axis + x.dim() if axis < 0 else axis
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


@onnx_operator("Softmax")
def softmax_of_rest(x: Tensor, *, axis: int = 1) -> Tensor:
    """Over all axes from one on."""
    return torch.softmax(_as_matrix(x, axis), 1).reshape(x.shape)


@onnx_operator("LogSoftmax")
def log_softmax_of_rest(x: Tensor, *, axis: int = 1) -> Tensor:
    """Over all axes from one on."""
    return torch.log_softmax(_as_matrix(x, axis), 1).reshape(x.shape)


@onnx_operator("Hardmax")
def hardmax_of_rest(x: Tensor, *, axis: int = 1) -> Tensor:
    """Over all axes from one on."""
    return hardmax(_as_matrix(x, axis), axis=1).reshape(x.shape)
