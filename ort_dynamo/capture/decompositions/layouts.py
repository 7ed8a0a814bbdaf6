"""Some kernels lay their results out in memory otherwise than torch's fake tensors promise.

In one case the dtype is another one.

What a user sees is the layout that the kernel gives, and what is computed from it is laid out accordingly. So each of
them is traced as operators whose fake tensors promise that: on an input laid out in the order in which the kernel
gives its result. Where the two agree, a function here gives NotImplemented, and the operator stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ort_dynamo.boundary import inverse, physical_order
from ort_dynamo.torch_internals.operators import OpOverload, aten, present
from ort_dynamo.torch_internals.promotion import is_contiguous, memory_format_of

__all__ = ["LAYOUTS"]

_CHANNELS_LAST = {4: (0, 2, 3, 1), 5: (0, 2, 3, 4, 1)}


def _is_channels_last(tensor: torch.Tensor) -> bool:
    """Ask whether kernels that know channels last take `tensor` for it, be it dense or not."""
    return memory_format_of(tensor) in (torch.channels_last, torch.channels_last_3d)


def _roll(self: torch.Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> Any:
    """The CPU's kernel concatenates two slices for each dimension, and cat keeps channels last."""
    if not dims or self.device.type != "cpu" or not _is_channels_last(self):
        return NotImplemented
    order = _CHANNELS_LAST[self.dim()]
    places = [order.index(dim % self.dim()) for dim in dims]
    return aten.roll(self.permute(order), shifts, places).permute(inverse(order))


def _channel_shuffle(self: torch.Tensor, groups: int) -> torch.Tensor:
    """The CPU's kernel keeps channels last."""
    channels = self.shape[1]
    rows = self.reshape(self.shape[0], groups, channels // groups, *self.shape[2:])
    keeps = self.device.type == "cpu" and _is_channels_last(self)
    shuffled = rows.transpose(1, 2).reshape(self.shape)
    return shuffled.clone(memory_format=memory_format_of(self) if keeps else torch.contiguous_format)


def _copysign(self: torch.Tensor, other: torch.Tensor) -> Any:
    """As in any elementwise kernel, the first operand decides; the fake tensor follows the second."""
    shape = torch.broadcast_shapes(self.shape, other.shape)  # type: ignore[no-untyped-call]
    if self.dim() < 2 or self.shape != shape:
        return NotImplemented
    order = physical_order(self.clone()) or tuple(range(self.dim()))
    if order == tuple(range(self.dim())) and is_contiguous(self) and is_contiguous(other):
        return NotImplemented
    x, sign = (one.expand_as(self).permute(order).contiguous() for one in (self, other))
    return aten.copysign(x, sign).permute(inverse(order))


def _log_sigmoid_forward(self: torch.Tensor) -> Any:
    """The CPU's kernel makes its results contiguous."""
    if self.device.type != "cpu" or is_contiguous(self):
        return NotImplemented
    return aten.log_sigmoid_forward(self.contiguous())


def _power(self: torch.Tensor, exponent: Any) -> Any:
    """The kernel copies the first power and fills in the zeroth, so that bools stay bools; the fake tensor is int64."""
    if self.dtype is not torch.bool or not isinstance(exponent, bool):
        return NotImplemented
    return self.clone() if exponent else torch.ones_like(self)


def _of_images(overload: OpOverload) -> Callable[..., Any]:
    """Make `overload` contiguous first what is neither that nor channels last, as its CPU kernels do."""

    def decomposition(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.device.type != "cpu" or is_contiguous(self) or _is_channels_last(self):
            return NotImplemented
        return overload(self.contiguous(), *args, **kwargs)

    return decomposition


LAYOUTS: Mapping[OpOverload, Callable[..., Any]] = present(
    {
        aten.roll.default: _roll,
        aten.channel_shuffle.default: _channel_shuffle,
        aten.native_channel_shuffle.default: _channel_shuffle,
        aten.copysign.Tensor: _copysign,
        aten.log_sigmoid_forward.default: _log_sigmoid_forward,
        aten.pow.Tensor_Scalar: _power,
        **{
            overload: _of_images(overload)
            for overload in (
                aten._native_batch_norm_legit_functional.default,
                aten._native_batch_norm_legit.no_stats,
                aten._native_batch_norm_legit_no_training.default,
                aten.native_batch_norm.default,
                aten._batch_norm_with_update_functional.default,
                aten._batch_norm_no_update.default,
            )
        },
    }
)
"""Overload -> what is traced in its place, with the overload's own arguments."""
