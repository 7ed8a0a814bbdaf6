"""Formulas of operators that torch has no decomposition for, or one that differs from eager."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch._refs
import torch.nn.functional as F
from torch._ops import OpOverload

__all__ = ["COMPOSITES"]

aten = torch.ops.aten

_KEY_PADDING = 1  # mask_type: 0 is a mask of scores (L, S), 1 of keys (N, S), 2 of every head's scores (N, H, L, S)


def _probabilities(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, mask_type: int | None
) -> torch.Tensor:
    """softmax(query key' / sqrt(width)); a mask is true, or not zero, where a query must not see a key."""
    scores = (query * query.shape[-1] ** -0.5) @ key.mT
    if mask is not None:
        # A row that is masked as a whole comes out NaN, as in eager.
        hidden = mask[:, None, None, :] if mask_type == _KEY_PADDING and mask.dim() == 2 else mask
        scores = scores.masked_fill(hidden.bool(), -torch.inf)
    return scores.softmax(-1)


def _native_multi_head_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    embed_dim: int,
    num_head: int,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
    mask: torch.Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> Any:
    """The fast path of torch.nn.MultiheadAttention: (N, L, embed_dim) operands of equal shapes."""
    weights, biases = qkv_weight.chunk(3), qkv_bias.chunk(3)
    heads = [
        F.linear(one, weight, bias).reshape(*one.shape[:2], num_head, embed_dim // num_head).transpose(1, 2)
        for one, weight, bias in zip((query, key, value), weights, biases, strict=True)
    ]
    probabilities = _probabilities(heads[0], heads[1], mask, mask_type)
    output = F.linear((probabilities @ heads[2]).transpose(1, 2).flatten(2), proj_weight, proj_bias)
    if not need_weights:
        return output, None
    return output, probabilities.mean(1) if average_attn_weights else probabilities


def _transformer_encoder_layer_fwd(
    src: torch.Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: torch.Tensor,
    norm_bias_1: torch.Tensor,
    norm_weight_2: torch.Tensor,
    norm_bias_2: torch.Tensor,
    ffn_weight_1: torch.Tensor,
    ffn_bias_1: torch.Tensor,
    ffn_weight_2: torch.Tensor,
    ffn_bias_2: torch.Tensor,
    mask: torch.Tensor | None = None,
    mask_type: int | None = None,
) -> torch.Tensor:
    """The fast path of torch.nn.TransformerEncoderLayer; src is (N, L, embed_dim)."""

    def attend(x: torch.Tensor) -> torch.Tensor:
        projections = (qkv_weight, qkv_bias, proj_weight, proj_bias)
        found: torch.Tensor = _native_multi_head_attention(
            x, x, x, embed_dim, num_heads, *projections, mask, need_weights=False, mask_type=mask_type
        )[0]
        return found

    def feed(x: torch.Tensor) -> torch.Tensor:
        inner = F.linear(x, ffn_weight_1, ffn_bias_1)
        return F.linear(F.gelu(inner) if use_gelu else F.relu(inner), ffn_weight_2, ffn_bias_2)

    def first(x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (embed_dim,), norm_weight_1, norm_bias_1, eps)

    def second(x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (embed_dim,), norm_weight_2, norm_bias_2, eps)

    if norm_first:
        x = src + attend(first(src))
        return x + feed(second(x))
    x = first(src + attend(src))
    return second(x + feed(x))


def _weight_norm_interface_backward(
    grad_w: torch.Tensor, saved_v: torch.Tensor, saved_g: torch.Tensor, saved_norms: torch.Tensor, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of w = v g / |v|, the norm taken over all dimensions but one.

    T. Salimans and D. Kingma, Weight Normalization, 2016, equation 3.
    """
    others = [axis for axis in range(saved_v.dim()) if axis != dim % saved_v.dim()]
    grad_g = (grad_w * saved_v).sum(others, keepdim=True) / saved_norms
    grad_v = (saved_g / saved_norms) * (grad_w - saved_v * (grad_g / saved_norms))
    return grad_v, grad_g


def _linspace(
    start: float | torch.Tensor,
    end: float | torch.Tensor,
    steps: int,
    *,
    dtype: torch.dtype | None = None,
    **place: Any,
) -> torch.Tensor:
    """torch's decomposition, but for integers as in eager: ends are rounded towards zero, the rest is in float64."""
    if dtype is not None and not (dtype.is_floating_point or dtype.is_complex):
        start, end = (
            x.to(dtype) if isinstance(x, torch.Tensor) else torch.scalar_tensor(math.trunc(x), dtype=torch.float64)
            for x in (start, end)
        )
    found: torch.Tensor = torch._refs.linspace(start, end, steps, dtype=dtype, **place)
    return found


COMPOSITES: Mapping[OpOverload, Callable[..., Any]] = {
    aten._native_multi_head_attention.default: _native_multi_head_attention,
    aten._transformer_encoder_layer_fwd.default: _transformer_encoder_layer_fwd,
    aten._weight_norm_interface_backward.default: _weight_norm_interface_backward,
    aten.linspace.default: _linspace,
    aten.linspace.Tensor_Tensor: _linspace,
    aten.linspace.Tensor_Scalar: _linspace,
    aten.linspace.Scalar_Tensor: _linspace,
}
"""Overload -> its formula, with the overload's own arguments."""
