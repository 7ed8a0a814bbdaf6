"""The attention operators that torch dispatches to on CUDA, and the one for devices of other makers.

They differ in the order of their arguments, and in those that nothing here reads or makes: random state, cumulative
lengths and debug masks, which serve dropout and nested tensors only.
"""

from __future__ import annotations

import functools
from typing import Any

import onnx_ir as ir

from ort_dynamo.lowering.context import LoweringContext
from ort_dynamo.lowering.ops.layers.attention import Attention, attention, gradients, results
from ort_dynamo.lowering.registry import register
from ort_dynamo.lowering.symbols import same_size
from ort_dynamo.torch_internals.kernels.operators import OpOverload, aten, named_arguments

_Given = dict[str, Any]


def _by_name(overload: OpOverload, args: tuple[Any, ...], kwargs: _Given) -> _Given:
    given = named_arguments(overload, args, kwargs)
    return {name.rstrip("_"): value for name, value in given.items()}  # one has grad_out_, the others grad_out


def _attention(ctx: LoweringContext, given: _Given, to_last_key: bool) -> Attention:
    query, key, value, is_causal = given["query"], given["key"], given["value"], given.get("is_causal", False)
    if to_last_key and is_causal and not same_size(ctx.sizes(query)[2], ctx.sizes(key)[2]):
        raise ctx.refuse("causal attention with unequal lengths: this operator aligns the mask to the last key")
    bias, dropout_p = given.get("attn_bias"), given.get("dropout_p", 0.0)
    return attention(ctx, query, key, value, bias, is_causal, dropout_p, given.get("scale"))


def _forward(
    overload: OpOverload, to_last_key: bool, ctx: LoweringContext, *args: Any, **kwargs: Any
) -> tuple[ir.Value | None, ...]:
    """_scaled_dot_product_efficient_attention(Tensor query, Tensor key, Tensor value, Tensor? attn_bias, bool compute_log_sumexp, float dropout_p=0., bool is_causal=False, *, float? scale=None) -> (Tensor output, Tensor log_sumexp, Tensor philox_seed, Tensor philox_offset)"""  # noqa: E501
    given = _by_name(overload, args, kwargs)
    return results(ctx, _attention(ctx, given, to_last_key), given["query"], given["value"])


def _backward(
    overload: OpOverload, to_last_key: bool, ctx: LoweringContext, *args: Any, **kwargs: Any
) -> tuple[ir.Value | None, ...]:
    """_scaled_dot_product_efficient_attention_backward(Tensor grad_out_, Tensor query, Tensor key, Tensor value, Tensor attn_bias, Tensor out, Tensor logsumexp, Tensor philox_seed, Tensor philox_offset, float dropout_p, bool[4] grad_input_mask, bool is_causal=False, *, float? scale=None) -> (Tensor, Tensor, Tensor, Tensor)"""  # noqa: E501
    given = _by_name(overload, args, kwargs)
    this = _attention(ctx, given, to_last_key)
    return gradients(ctx, this, given["grad_out"], given["query"], given["out"], given["logsumexp"])


for _attends, _differentiates, _to_last_key in (
    (
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_efficient_attention_backward.default,
        False,
    ),
    (
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_flash_attention_backward.default,
        True,
    ),
    (
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_cudnn_attention_backward.default,
        True,
    ),
    (
        aten._scaled_dot_product_fused_attention_overrideable.default,
        aten._scaled_dot_product_fused_attention_overrideable_backward.default,
        False,
    ),
):
    register(_attends, functools.partial(_forward, _attends, _to_last_key))
    register(_differentiates, functools.partial(_backward, _differentiates, _to_last_key))
