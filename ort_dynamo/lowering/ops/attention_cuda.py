"""The attention operators that torch dispatches to on CUDA, and the one for devices of other makers.

Random state and cumulative lengths serve dropout and nested tensors only; nothing here reads or makes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from ort_dynamo.lowering.context import LoweringContext
from ort_dynamo.lowering.ops.attention import attention, gradients, results
from ort_dynamo.lowering.registry import lowering
from ort_dynamo.lowering.symbols import same_size
from ort_dynamo.torch_internals.operators import aten


def _check_square(ctx: LoweringContext, query: ir.Value, key: ir.Value, is_causal: bool) -> None:
    if is_causal and not same_size(ctx.sizes(query)[2], ctx.sizes(key)[2]):
        raise ctx.refuse("a causal attention of unequal lengths: this operator aligns the mask to the last key")


@lowering(aten._scaled_dot_product_efficient_attention.default)
def efficient_attention(
    ctx: LoweringContext,
    query: ir.Value,
    key: ir.Value,
    value: ir.Value,
    attn_bias: ir.Value | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[ir.Value | None, ...]:
    """_scaled_dot_product_efficient_attention(Tensor query, Tensor key, Tensor value, Tensor? attn_bias, bool compute_log_sumexp, float dropout_p=0., bool is_causal=False, *, float? scale=None) -> (Tensor output, Tensor log_sumexp, Tensor philox_seed, Tensor philox_offset)"""  # noqa: E501
    this = attention(ctx, query, key, value, attn_bias, is_causal, dropout_p, scale)
    return results(ctx, this, query, value)


@lowering(aten._scaled_dot_product_efficient_attention_backward.default)
def efficient_attention_backward(
    ctx: LoweringContext,
    grad_out_: ir.Value,
    query: ir.Value,
    key: ir.Value,
    value: ir.Value,
    attn_bias: ir.Value | None,
    out: ir.Value,
    logsumexp: ir.Value,
    philox_seed: Any,
    philox_offset: Any,
    dropout_p: float,
    grad_input_mask: Sequence[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[ir.Value | None, ...]:
    """_scaled_dot_product_efficient_attention_backward(Tensor grad_out_, Tensor query, Tensor key, Tensor value, Tensor attn_bias, Tensor out, Tensor logsumexp, Tensor philox_seed, Tensor philox_offset, float dropout_p, bool[4] grad_input_mask, bool is_causal=False, *, float? scale=None) -> (Tensor, Tensor, Tensor, Tensor)"""  # noqa: E501
    this = attention(ctx, query, key, value, attn_bias, is_causal, dropout_p, scale)
    return gradients(ctx, this, grad_out_, query, out, logsumexp)


@lowering(aten._scaled_dot_product_flash_attention.default)
def flash_attention(
    ctx: LoweringContext,
    query: ir.Value,
    key: ir.Value,
    value: ir.Value,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[ir.Value | None, ...]:
    """_scaled_dot_product_flash_attention(Tensor query, Tensor key, Tensor value, float dropout_p=0., bool is_causal=False, bool return_debug_mask=False, *, float? scale=None) -> (Tensor output, Tensor logsumexp, Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, Tensor rng_state, Tensor unused, Tensor debug_attn_mask)"""  # noqa: E501
    _check_square(ctx, query, key, is_causal)
    this = attention(ctx, query, key, value, None, is_causal, dropout_p, scale)
    return results(ctx, this, query, value)


@lowering(aten._scaled_dot_product_flash_attention_backward.default)
def flash_attention_backward(
    ctx: LoweringContext,
    grad_out: ir.Value,
    query: ir.Value,
    key: ir.Value,
    value: ir.Value,
    out: ir.Value,
    logsumexp: ir.Value,
    cum_seq_q: Any,
    cum_seq_k: Any,
    max_q: Any,
    max_k: Any,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Any,
    philox_offset: Any,
    *,
    scale: float | None = None,
) -> tuple[ir.Value | None, ...]:
    """_scaled_dot_product_flash_attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, float dropout_p, bool is_causal, Tensor philox_seed, Tensor philox_offset, *, float? scale=None) -> (Tensor grad_query, Tensor grad_key, Tensor grad_value)"""  # noqa: E501
    _check_square(ctx, query, key, is_causal)
    this = attention(ctx, query, key, value, None, is_causal, dropout_p, scale)
    return gradients(ctx, this, grad_out, query, out, logsumexp)


@lowering(aten._scaled_dot_product_cudnn_attention.default)
def cudnn_attention(
    ctx: LoweringContext,
    query: ir.Value,
    key: ir.Value,
    value: ir.Value,
    attn_bias: ir.Value | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[ir.Value | None, ...]:
    """_scaled_dot_product_cudnn_attention(Tensor query, Tensor key, Tensor value, Tensor? attn_bias, bool compute_log_sumexp, float dropout_p=0., bool is_causal=False, bool return_debug_mask=False, *, float? scale=None) -> (Tensor output, Tensor logsumexp, Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, Tensor philox_seed, Tensor philox_offset, Tensor debug_attn_mask)"""  # noqa: E501
    _check_square(ctx, query, key, is_causal)
    this = attention(ctx, query, key, value, attn_bias, is_causal, dropout_p, scale)
    return results(ctx, this, query, value)


@lowering(aten._scaled_dot_product_cudnn_attention_backward.default)
def cudnn_attention_backward(
    ctx: LoweringContext,
    grad_out: ir.Value,
    query: ir.Value,
    key: ir.Value,
    value: ir.Value,
    out: ir.Value,
    logsumexp: ir.Value,
    philox_seed: Any,
    philox_offset: Any,
    attn_bias: ir.Value | None,
    cum_seq_q: Any,
    cum_seq_k: Any,
    max_q: Any,
    max_k: Any,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None = None,
) -> tuple[ir.Value | None, ...]:
    """_scaled_dot_product_cudnn_attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, Tensor philox_seed, Tensor philox_offset, Tensor attn_bias, Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, float dropout_p, bool is_causal, *, float? scale=None) -> (Tensor, Tensor, Tensor)"""  # noqa: E501
    _check_square(ctx, query, key, is_causal)
    this = attention(ctx, query, key, value, attn_bias, is_causal, dropout_p, scale)
    return gradients(ctx, this, grad_out, query, out, logsumexp)


@lowering(aten._scaled_dot_product_fused_attention_overrideable.default)
def overrideable_attention(
    ctx: LoweringContext,
    query: ir.Value,
    key: ir.Value,
    value: ir.Value,
    attn_bias: ir.Value | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[ir.Value | None, ...]:
    """_scaled_dot_product_fused_attention_overrideable(Tensor query, Tensor key, Tensor value, Tensor? attn_bias=None, float dropout_p=0., bool is_causal=False, bool return_debug_mask=False, *, float? scale=None) -> (Tensor output, Tensor logsumexp, Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, Tensor philox_seed, Tensor philox_offset, Tensor debug_attn_mask)"""  # noqa: E501
    this = attention(ctx, query, key, value, attn_bias, is_causal, dropout_p, scale)
    return results(ctx, this, query, value)


@lowering(aten._scaled_dot_product_fused_attention_overrideable_backward.default)
def overrideable_attention_backward(
    ctx: LoweringContext,
    grad_out: ir.Value,
    query: ir.Value,
    key: ir.Value,
    value: ir.Value,
    attn_bias: ir.Value | None,
    grad_input_mask: Sequence[bool],
    out: ir.Value,
    logsumexp: ir.Value,
    cum_seq_q: Any,
    cum_seq_k: Any,
    max_q: Any,
    max_k: Any,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Any,
    philox_offset: Any,
    *,
    scale: float | None = None,
) -> tuple[ir.Value | None, ...]:
    """_scaled_dot_product_fused_attention_overrideable_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor attn_bias, bool[4] grad_input_mask, Tensor out, Tensor logsumexp, Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, float dropout_p, bool is_causal, Tensor philox_seed, Tensor philox_offset, *, float? scale=None) -> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_attn_bias)"""  # noqa: E501
    this = attention(ctx, query, key, value, attn_bias, is_causal, dropout_p, scale)
    return gradients(ctx, this, grad_out, query, out, logsumexp)
