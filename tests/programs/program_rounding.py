"""Add noise of a rounding error's size to the result of each operator of a run.

Two correct implementations of a program round at other points and add in other orders. Their difference may be as large
as the change of a float64 run whose operators round. It is large if terms of a gradient cancel, or if a norm divides a
value that varies little by its deviation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

__all__ = ["Rounded"]

_MOVES = """
    alias arange as_strided bernoulli cat clamp clamp_max clamp_min clone constant_pad_nd contiguous copy empty_like
    empty eye flip full full_like gather hardtanh index index_put index_select lift_fresh max max_pool2d_with_indices
    max_pool3d_with_indices maximum minimum min new_empty new_empty_strided new_full new_ones new_zeros native_dropout
    neg ones ones_like permute pixel_shuffle pixel_unshuffle rand randn relu repeat roll scalar_tensor select_backward
    select_scatter slice_backward slice_scatter split stack threshold threshold_backward where zeros zeros_like abs
    _to_copy _unsafe_view _reshape_copy amax amin copysign adaptive_max_pool2d adaptive_max_pool3d
"""
"""Operators that only move data: no implementation rounds them."""

_EXACT = frozenset(_MOVES.split())

_UPDATES_STATISTICS = ("native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update", "cudnn_batch_norm")
"""Operators that write to their later operands: they must get those and not copies."""


class Rounded(TorchDispatchMode):
    """Mode in which each operator has operands and results with noise.

    A pointwise operator rounds its result only. Others add up products of operands, so that the noise is on the
    operands: its effect is relative to the terms and not to a sum in which they cancel.
    """

    def __init__(self, size: float, seed: int = 0) -> None:
        super().__init__()
        self._size = size
        self._noise = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        name = func._schema.name.removeprefix("aten::")
        moves = name in _EXACT or func._schema.is_mutable or any(one.alias_info for one in func._schema.returns)
        if moves:
            return func(*args, **given)
        if torch.Tag.pointwise not in func.tags:
            count = 1 if name in _UPDATES_STATISTICS else len(args)
            args = (*tree_map_only(Tensor, self._rounded, tuple(args[:count])), *args[count:])
        return tree_map_only(Tensor, self._rounded, func(*args, **given))

    def _rounded(self, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or not tensor.numel():
            return tensor
        noise = torch.randn(tensor.shape, generator=self._noise, dtype=torch.float64)
        return tensor * noise.mul_(self._size).add_(1).to(tensor.dtype)
