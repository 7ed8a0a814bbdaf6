"""Trace operators with the memory layout of their kernels, if fake tensors promise another one.

In one case the dtype differs instead. `torch_internals/kernels/kernel_layouts.py` is the table of the kernels.

The program and later operators see the layout of the kernel. So each of these operators is traced on operands whose
dimensions have the order of the kernel's result; for these, fake tensors are right. If they are right anyway, a
function here gives NotImplemented, and the operator does not change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ort_dynamo.graph.boundary import has_strides, inverse, physical_order
from ort_dynamo.torch_internals.kernels.kernel_layouts import BROADCAST, CONTIGUOUS, LAID_OUT_AS
from ort_dynamo.torch_internals.kernels.operators import OpOverload, aten, present
from ort_dynamo.torch_internals.kernels.promotion import is_contiguous, memory_format_of

__all__ = ["LAYOUTS"]

_CHANNELS_LAST = {4: (0, 2, 3, 1), 5: (0, 2, 3, 4, 1)}


def _is_channels_last(tensor: torch.Tensor) -> bool:
    """Check whether kernels that know channels last take `tensor` for it, be it dense or not."""
    return memory_format_of(tensor) in (torch.channels_last, torch.channels_last_3d)


def _restored(result: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Undo a permutation of the operands in a result, which is no view to autograd, as the kernel's is none."""
    permuted = result.permute(inverse(tuple(order)))
    return aten._unsafe_view(permuted, permuted.shape)


def _roll(self: torch.Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> Any:
    """Concatenate two slices for each dimension, as the CPU's kernel does: cat keeps channels last."""
    if not dims or self.device.type != "cpu" or not _is_channels_last(self):
        return NotImplemented
    order = _CHANNELS_LAST[self.dim()]
    places = [order.index(dim % self.dim()) for dim in dims]
    return _restored(aten.roll(self.permute(order), shifts, places), order)


def _channel_shuffle(self: torch.Tensor, groups: int) -> torch.Tensor:
    """Keep channels last, as the CPU's kernel does."""
    channels = self.shape[1]
    rows = self.reshape(self.shape[0], groups, channels // groups, *self.shape[2:])
    keeps = self.device.type == "cpu" and _is_channels_last(self)
    shuffled = rows.transpose(1, 2).reshape(self.shape)
    return shuffled.clone(memory_format=memory_format_of(self) if keeps else torch.contiguous_format)


def _in_layout_of_first(overload: OpOverload) -> Callable[..., Any]:
    """Make an elementwise operator whose first operand decides the layout read the others in it."""

    def decomposition(first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        operands = [first, *(one for one in args if isinstance(one, torch.Tensor))]
        shape = torch.broadcast_shapes(*(one.shape for one in operands))  # type: ignore[no-untyped-call]
        if first.dim() < 2 or first.shape != shape:
            return NotImplemented
        order = physical_order(first.clone()) or tuple(range(first.dim()))
        if order == tuple(range(first.dim())) and all(map(is_contiguous, operands)):
            return NotImplemented
        arguments = (
            one.expand_as(first).permute(order).contiguous() if isinstance(one, torch.Tensor) else one
            for one in (first, *args)
        )
        return _restored(overload(*arguments, **kwargs), order)

    return decomposition


def _in_layout_of_sum(overload: OpOverload) -> Callable[..., Any]:
    """Make an elementwise operator of two tensors read both in the layout of their sum."""

    def decomposition(first: Any, second: Any, **kwargs: Any) -> Any:
        if not (isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor)):
            return NotImplemented
        if is_contiguous(first) and is_contiguous(second):
            return NotImplemented
        if first.shape == second.shape and physical_order(first) == physical_order(second) != ():
            return NotImplemented
        total = first + second
        order = physical_order(total) or tuple(range(total.dim()))
        operands = (_permuted(one, order) for one in (first, second))
        return _restored(overload(*operands, **kwargs), order)

    return decomposition


def _permuted(operand: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Permute an operand that may be broadcast, with dimensions of one element for those that it lacks."""
    shape = [1] * (len(order) - operand.dim()) + list(operand.shape)
    return operand.reshape(shape).permute(tuple(order)).contiguous()


def _keeps_layout(overload: OpOverload) -> Callable[..., Any]:
    """Make an operator along a dimension, which writes to a copy of its first operand, do so in this one's layout."""

    def decomposition(self: torch.Tensor, dim: int, *args: Any, **kwargs: Any) -> Any:
        if not (order := physical_order(self.clone())):
            return NotImplemented
        permuted = self.permute(order).contiguous()
        return _restored(overload(permuted, order.index(dim % self.dim()), *args, **kwargs), order)

    return decomposition


def _keeps_format(overload: OpOverload) -> Callable[..., Any]:
    """Make an operator whose CPU kernel gives images in their memory format compute contiguous ones, then do so."""

    def decomposition(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.device.type != "cpu" or is_contiguous(self) or not _is_channels_last(self):
            return NotImplemented
        return overload(self.contiguous(), *args, **kwargs).clone(memory_format=memory_format_of(self))

    return decomposition


def _native_dropout_backward(grad_output: torch.Tensor, mask: torch.Tensor, scale: float) -> Any:
    """Keep the gradient's layout, as the kernel's matmul does; torch's decomposition copies to a memory format."""
    if is_contiguous(grad_output) or _is_channels_last(grad_output):
        return NotImplemented
    return grad_output * (mask.to(grad_output.dtype) * scale)


def _nll_loss2d_forward(self: torch.Tensor, target: torch.Tensor, *args: Any) -> Any:
    """Give the losses contiguous, as the CPU's kernel does; the fake tensor has the target's layout."""
    if self.device.type != "cpu" or is_contiguous(target):
        return NotImplemented
    return aten.nll_loss2d_forward(self, target.contiguous(), *args)


def _addr(self: torch.Tensor, vec1: torch.Tensor, vec2: torch.Tensor, **kwargs: Any) -> Any:
    """Give the result the matrix's layout, as the kernel does; the fake tensor differs if it is multiplied by zero."""
    if self.dim() != 2 or physical_order(self.clone()) != (1, 0):
        return NotImplemented
    return _restored(aten.addr(self.t().contiguous(), vec2, vec1, **kwargs), (1, 0))


def _in_layout_of_input(overload: OpOverload) -> Callable[..., Any]:
    """Make the gradient of a batch normalization read the result's gradient in the memory format of the input."""

    def decomposition(gradient: torch.Tensor, given: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        layout = memory_format_of(given)
        if given.device.type != "cpu" or gradient.dim() not in _CHANNELS_LAST or layout == memory_format_of(gradient):
            return NotImplemented
        return overload(gradient.clone(memory_format=layout), given, *args, **kwargs)

    return decomposition


def _contiguous(overload: OpOverload) -> Callable[..., Any]:
    """Make an operator whose result is always contiguous read a contiguous operand."""

    def decomposition(*args: Any) -> Any:
        (operand,) = (one for one in args if isinstance(one, torch.Tensor))
        if operand.device.type != "cpu" or is_contiguous(operand):
            return NotImplemented
        return overload(*(one.contiguous() if one is operand else one for one in args))

    return decomposition


def _power(self: torch.Tensor, exponent: Any) -> Any:
    """Copy the first power and fill in the zeroth, so that bools stay bools; the fake tensor is int64."""
    if self.dtype is not torch.bool or not isinstance(exponent, bool):
        return NotImplemented
    return self.clone() if exponent else torch.ones_like(self)


def _of_images(overload: OpOverload) -> Callable[..., Any]:
    """Make an input of `overload` contiguous first if it is neither that nor channels last, as its CPU kernels do.

    For these kernels, a tensor is channels last whatever the strides of dimensions of one element are.
    """

    def decomposition(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.device.type != "cpu" or is_contiguous(self) or _is_channels_last(self):
            return NotImplemented
        if self.dim() in _CHANNELS_LAST and has_strides(self, _CHANNELS_LAST[self.dim()]):
            return NotImplemented
        return overload(self.contiguous(), *args, **kwargs)

    return decomposition


LAYOUTS: Mapping[OpOverload, Callable[..., Any]] = present(
    {
        aten.roll.default: _roll,
        aten.channel_shuffle.default: _channel_shuffle,
        aten.native_channel_shuffle.default: _channel_shuffle,
        **{overload: _contiguous(overload) for overload in CONTIGUOUS},
        **{
            overload: (_in_layout_of_first if decider == 0 else _in_layout_of_input)(overload)
            for overload, decider in LAID_OUT_AS.items()
        },
        **{overload: _in_layout_of_sum(overload) for overload in BROADCAST},
        **{overload: _keeps_layout(overload) for overload in (aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)},
        **{
            overload: _keeps_format(overload)
            for overload in (
                aten.max_unpool2d.default,
                aten.reflection_pad3d.default,
                aten.replication_pad3d.default,
            )
        },
        aten.native_dropout_backward.default: _native_dropout_backward,
        aten.nll_loss2d_forward.default: _nll_loss2d_forward,
        aten.addr.default: _addr,
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
"""Overload -> the function that is traced instead, with the same arguments."""
