"""Gives the attention operators that torch dispatches to on CUDA a kernel on the CPU: by those of the CPU's own.

Their dropout is not: a graph that asks for it fails here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["attention_on_the_cpu"]

aten = torch.ops.aten


@contextmanager
def attention_on_the_cpu() -> Iterator[None]:
    """Register the kernels, from `with` to its end."""
    library = torch.library.Library("aten", "IMPL")
    try:
        for name, kernel in _KERNELS.items():
            library.impl(name, kernel, "CPU")
        yield
    finally:
        library._destroy()


def _flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout: float = 0.0,
    causal: bool = False,
    debug: bool = False,
    *,
    scale: Any = None,
) -> Any:
    assert not dropout
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    return out, lse, *_unread(q, k)


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any, scale: Any = None
) -> Any:
    causal = rest[5]
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse, 0.0, causal, scale=scale)


def _efficient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Any,
    with_lse: bool,
    dropout: float = 0.0,
    causal: bool = False,
    *,
    scale: Any = None,
) -> Any:
    assert not dropout
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
    rows = lse.shape[-1]
    padded = F.pad(lse, (0, -rows % 32), value=float("inf"))
    return out, padded, torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64)


def _efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Any, out: Tensor, lse: Tensor, *rest: Any, scale: Any = None
) -> Any:
    causal = rest[4] if len(rest) > 4 else False
    found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse[..., : q.shape[2]].contiguous(), 0.0, causal, attn_mask=bias, scale=scale
    )
    return *found, None


def _unread(q: Tensor, k: Tensor) -> Any:
    state = torch.zeros(2, dtype=torch.uint64)
    return None, None, q.shape[2], k.shape[2], state, torch.zeros((), dtype=torch.uint64), q.new_empty(0)


_KERNELS = {
    "_scaled_dot_product_flash_attention": _flash,
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_efficient_attention": _efficient,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
}
