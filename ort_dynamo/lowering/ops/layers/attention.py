"""Scaled dot-product attention with its gradient: the fused operators that torch dispatches to, as plain matmuls.

The forward gives the log-sum-exp of each row of scores, the backward recomputes the probabilities from it:

    S = scale * Q K' + bias        L = log(sum(exp(S)))        P = exp(S - L)        O = P V
    dV = P' dO      dP = dO V'     dS = P * (dP - sum(dO * O))     dQ = scale * dS K     dK = scale * dS' Q

(Dao et al., FlashAttention, 2022, without its tiling: the scores exist as a whole.) Query heads that share a key head
are stacked as rows of one matrix, so keys and values are never repeated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import onnx_ir as ir
import torch

from ort_dynamo.graph.dtypes import is_representable, onnx_dtype
from ort_dynamo.lowering.context import LoweringContext, Size, is_empty
from ort_dynamo.lowering.recipes.promotion import float_dtype
from ort_dynamo.lowering.recipes.zeros import zeros
from ort_dynamo.lowering.registry import lowering
from ort_dynamo.lowering.symbols import same_size
from ort_dynamo.torch_internals.kernels.operators import aten

__all__ = ["Attention", "attention", "gradients", "results"]


@dataclass(frozen=True)
class Attention:
    """The operands of one attention.

    Attributes:
        query: (batch, key heads, query length times query heads per key head, width).
        key, value: (batch, key heads, key length, width).
        bias: the bias of the scores; broadcasts to their shape.
        masked: whether `bias` may be -inf along a whole row.
        scale: the scale of the scores.
        scores: the shape of the scores, (batch, query heads, query length, key length).
        grouped: whether several query heads share a key head.
        stacked: the first three dimensions of `query`.
        compute: the dtype of query, key and value.
        accumulate: the dtype of the scores and the bias.
    """

    query: ir.Value
    key: ir.Value
    value: ir.Value
    bias: ir.Value | None
    masked: bool
    scale: float | ir.Value
    scores: tuple[Size, ...]
    grouped: bool
    stacked: tuple[Size, ...]
    compute: torch.dtype
    accumulate: torch.dtype

    def stack(self, ctx: LoweringContext, value: ir.Value, width: Size) -> ir.Value:
        """(batch, query heads, query length, width) -> (*stacked, width)"""
        return ctx.reshape(value, [*self.stacked, width]) if self.grouped else value

    def unstack(self, ctx: LoweringContext, value: ir.Value, width: Size) -> ir.Value:
        """(*stacked, width) -> (batch, query heads, query length, width)"""
        return ctx.reshape(value, [*self.scores[:3], width]) if self.grouped else value


def attention(
    ctx: LoweringContext,
    query: ir.Value,
    key: ir.Value,
    value: ir.Value,
    mask: ir.Value | None,
    is_causal: bool,
    dropout_p: float,
    scale: float | None,
) -> Attention:
    """Return the attention of an operator's arguments; refuses arguments that have no form here."""
    if dropout_p != 0:
        raise ctx.refuse("fused attention with dropout is not supported")
    if isinstance(scale, torch.SymFloat):
        raise ctx.refuse("the attention's scale is symbolic")
    if ctx.rank(query) != 4 or ctx.rank(key) != 4:
        raise ctx.refuse("query and key are not of shape (batch, heads, length, width)")
    batch, heads, rows, width = ctx.sizes(query)
    key_heads, columns = ctx.sizes(key)[1:3]
    if is_empty((*ctx.sizes(query), *ctx.sizes(value))):
        raise ctx.refuse("attention of empty tensors is not supported")
    dtype = ctx.dtype(query)
    accumulate = float_dtype(dtype)
    # Matmuls of half types where the target has them; those on the CPU are float32.
    compute = dtype if ctx.target.takes("MatMul", "", {"T": onnx_dtype(dtype)}) else accumulate
    scores = stacked = (batch, heads, rows)
    grouped = not same_size(heads, key_heads)
    if grouped:
        stacked = (batch, key_heads, rows * (heads // key_heads))
    q, k, v = (ctx.cast(operand, compute) for operand in (query, key, value))
    return Attention(
        query=ctx.reshape(q, [*stacked, width]) if grouped else q,
        key=k,
        value=v,
        bias=_bias(ctx, mask, is_causal, rows, columns, accumulate),
        masked=mask is not None,
        scale=_default_scale(ctx, width, compute) if scale is None else _given_scale(ctx, scale, compute),
        scores=(*scores, columns),
        grouped=grouped,
        stacked=stacked,
        compute=compute,
        accumulate=accumulate,
    )


def _default_scale(ctx: LoweringContext, width: Size, dtype: torch.dtype) -> float | ir.Value:
    """1 / sqrt(width)"""
    if isinstance(width, int):
        return 1.0 / math.sqrt(width)
    return ctx.op.Reciprocal(ctx.op.Sqrt(ctx.scalar(width, dtype)))


def _given_scale(ctx: LoweringContext, scale: float | torch.SymFloat, dtype: torch.dtype) -> float | ir.Value:
    return ctx.scalar(scale, dtype) if isinstance(scale, torch.SymFloat) else float(scale)


def _bias(
    ctx: LoweringContext, mask: ir.Value | None, is_causal: bool, rows: Size, columns: Size, dtype: torch.dtype
) -> ir.Value | None:
    """Give the bias: 0 if a query may attend to a key, else -inf; or the caller's bias; None for no bias.

    It is added to the scores, since a Where on them takes twice as long.
    """
    op = ctx.op
    bias = None
    if mask is not None and ctx.dtype(mask) == torch.bool:
        bias = op.Where(mask, ctx.constant(0, dtype), ctx.constant(-math.inf, dtype))
    elif mask is not None:
        bias = ctx.cast(mask, dtype)
    if not is_causal:
        return bias
    zero, one = ctx.constant(0, torch.int64), ctx.constant(1, torch.int64)
    i = op.Unsqueeze(op.Range(zero, ctx.scalar(rows, torch.int64), one), [1])
    j = op.Unsqueeze(op.Range(zero, ctx.scalar(columns, torch.int64), one), [0])
    causal = op.Where(op.LessOrEqual(j, i), ctx.constant(0, dtype), ctx.constant(-math.inf, dtype))
    return causal if bias is None else op.Add(bias, causal)


def _product(
    ctx: LoweringContext,
    a: ir.Value,
    b: ir.Value,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    scale: float | ir.Value = 1.0,
) -> ir.Value:
    """scale * a @ b of 4-D operands, either transposed in its last two dimensions."""
    op = ctx.op
    # alpha is a float32 attribute: too coarse for float64.
    alpha = scale if isinstance(scale, float) and a.dtype != ir.DataType.DOUBLE else 1.0
    if ctx.has_fused_matmul(a) and (alpha != 1 or transpose_a or transpose_b):
        result = ctx.contrib.FusedMatMul(a, b, alpha=alpha, transA=int(transpose_a), transB=int(transpose_b))
    else:
        alpha = 1.0
        a = op.Transpose(a, perm=[0, 1, 3, 2]) if transpose_a else a
        b = op.Transpose(b, perm=[0, 1, 3, 2]) if transpose_b else b
        result = op.MatMul(a, b)
    return result if alpha == scale else op.Mul(result, scale)


def _scores(ctx: LoweringContext, this: Attention) -> ir.Value:
    scores = _product(ctx, this.query, this.key, transpose_b=True, scale=this.scale)
    scores = this.unstack(ctx, ctx.cast(scores, this.accumulate), this.scores[-1])
    return scores if this.bias is None else ctx.op.Add(scores, this.bias)


def _forward(ctx: LoweringContext, this: Attention, width: Size, need_lse: bool) -> tuple[ir.Value, ir.Value | None]:
    """Return the output, and the log-sum-exp (batch, query heads, query length) in `accumulate` if it is needed."""
    op = ctx.op
    scores = _scores(ctx, this)
    probabilities = op.Softmax(scores, axis=-1)
    weights = this.stack(ctx, ctx.cast(probabilities, this.compute), this.scores[-1])
    output = this.unstack(ctx, _product(ctx, weights, this.value), width)
    if not need_lse and not this.masked:
        return output, None
    largest = op.ReduceMax(scores, [3], keepdims=1)  # not [-1]: defect last_axis_of_nothing
    # torch gives 0 for the output and the log-sum-exp of a row that is masked away as a whole.
    empty = op.Equal(largest, -math.inf)
    if this.masked:
        output = op.Where(empty, 0.0, output)
    if not need_lse:
        return output, None
    # The largest probability is exp(largest - lse). ReduceLogSumExp would take as long as the matmuls.
    lse = op.Sub(largest, op.Log(op.ReduceMax(probabilities, [3], keepdims=1)))
    if this.masked:
        lse = op.Where(empty, 0.0, lse)
    return output, op.Squeeze(lse, [-1])


def _backward(
    ctx: LoweringContext, this: Attention, grad_out: ir.Value, query: ir.Value, out: ir.Value, lse: ir.Value
) -> tuple[ir.Value | None, ...]:
    """Gradients of query, key, value and scores, those that somebody reads."""
    op = ctx.op
    columns = this.scores[-1]
    probabilities = op.Exp(op.Sub(_scores(ctx, this), op.Unsqueeze(ctx.cast(lse, this.accumulate), [-1])))
    grad = this.stack(ctx, ctx.cast(grad_out, this.compute), ctx.sizes(grad_out)[-1])
    gradients: list[ir.Value | None] = [None, None, None, None]
    if 2 in ctx.used:
        weights = this.stack(ctx, ctx.cast(probabilities, this.compute), columns)
        gradients[2] = _product(ctx, weights, grad, transpose_a=True)
    grad_weights = _product(ctx, grad, this.value, transpose_b=True)
    grad_weights = this.unstack(ctx, ctx.cast(grad_weights, this.accumulate), columns)
    products = op.Mul(ctx.cast(grad_out, this.accumulate), ctx.cast(out, this.accumulate))
    row = op.ReduceSum(products, [3], keepdims=1)
    gradients[3] = grad_scores = op.Mul(probabilities, op.Sub(grad_weights, row))
    grad_scores = this.stack(ctx, ctx.cast(grad_scores, this.compute), columns)
    if 0 in ctx.used:
        grad_query = _product(ctx, grad_scores, this.key, scale=this.scale)
        gradients[0] = this.unstack(ctx, grad_query, ctx.sizes(query)[-1])
    if 1 in ctx.used:
        gradients[1] = _product(ctx, grad_scores, this.query, transpose_a=True, scale=this.scale)
    return tuple(gradients)


# -- outputs of the operators --------------------------------------------------------------------------------------


def results(ctx: LoweringContext, this: Attention, query: ir.Value, value: ir.Value) -> tuple[ir.Value | None, ...]:
    """Return a forward's output, log-sum-exp in the operator's shape, and dropout's state, which is unused."""
    output, lse = _forward(ctx, this, ctx.sizes(value)[-1], need_lse=1 in ctx.used)
    results: list[ir.Value | None] = [ctx.cast(output, ctx.out[0].dtype)]
    results.append(None if lse is None else ctx.cast(_shaped(ctx, this, query, lse), ctx.out[1].dtype))
    for index in range(2, len(ctx.out)):
        fake = ctx.out[index]
        if index in ctx.used and isinstance(fake, torch.Tensor) and not is_representable(fake.dtype):
            raise ctx.refuse("its gradient needs the state of torch's random generator")
        if index in ctx.used and isinstance(fake, torch.Tensor) and fake.dim() == 0:
            results.append(ctx.constant(0, fake.dtype))
        else:
            results.append(None)
    return tuple(results)


def _shaped(ctx: LoweringContext, this: Attention, query: ir.Value, lse: ir.Value) -> ir.Value:
    """Return the log-sum-exp as its operator has it: with a last dimension of 1, or longer than the queries."""
    sizes = tuple(ctx.out[1].shape)
    rows = this.scores[2]
    if len(sizes) == 4:
        return ctx.op.Unsqueeze(lse, [3])
    if same_size(sizes[2], rows):
        return lse
    if same_size(sizes[2], 0):
        return zeros(ctx, query, sizes)
    return ctx.op.Pad(lse, ctx.shape([0, 0, 0, 0, 0, sizes[2] - rows]))


def gradients(
    ctx: LoweringContext,
    this: Attention,
    grad_out: ir.Value,
    query: ir.Value,
    out: ir.Value,
    logsumexp: ir.Value,
) -> tuple[ir.Value | None, ...]:
    """Return the outputs of a backward."""
    op = ctx.op
    rows = this.scores[2]
    if ctx.rank(logsumexp) == 4:
        logsumexp = op.Squeeze(logsumexp, [3])
    elif not same_size(ctx.sizes(logsumexp)[2], rows):
        logsumexp = op.Slice(logsumexp, [0], ctx.shape([rows]), [2])
    found = list(_backward(ctx, this, grad_out, query, out, logsumexp))
    if len(ctx.out) > 3 and 3 in ctx.used:
        assert found[3] is not None
        sizes = tuple(ctx.out[3].shape)
        repeated = [i for i in range(4) if not same_size(sizes[i], this.scores[i])]
        found[3] = op.ReduceSum(found[3], repeated, keepdims=1) if repeated else found[3]
    return tuple(
        ctx.cast(gradient, fake.dtype) if gradient is not None and index in ctx.used else None
        for index, (gradient, fake) in enumerate(zip(found, ctx.out, strict=False))
    )


# -- CPU ----------------------------------------------------------------------------------------------------------


@lowering(aten._scaled_dot_product_flash_attention_for_cpu.default)
def flash_attention_for_cpu(
    ctx: LoweringContext,
    query: ir.Value,
    key: ir.Value,
    value: ir.Value,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: ir.Value | None = None,
    scale: float | None = None,
) -> tuple[ir.Value | None, ...]:
    """_scaled_dot_product_flash_attention_for_cpu(Tensor query, Tensor key, Tensor value, float dropout_p=0., bool is_causal=False, *, Tensor? attn_mask=None, float? scale=None) -> (Tensor output, Tensor logsumexp)"""  # noqa: E501
    this = attention(ctx, query, key, value, attn_mask, is_causal, dropout_p, scale)
    return results(ctx, this, query, value)


@lowering(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def flash_attention_for_cpu_backward(
    ctx: LoweringContext,
    grad_out: ir.Value,
    query: ir.Value,
    key: ir.Value,
    value: ir.Value,
    out: ir.Value,
    logsumexp: ir.Value,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: ir.Value | None = None,
    scale: float | None = None,
) -> tuple[ir.Value | None, ...]:
    """_scaled_dot_product_flash_attention_for_cpu_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, float dropout_p, bool is_causal, *, Tensor? attn_mask=None, float? scale=None) -> (Tensor grad_query, Tensor grad_key, Tensor grad_value)"""  # noqa: E501
    this = attention(ctx, query, key, value, attn_mask, is_causal, dropout_p, scale)
    return gradients(ctx, this, grad_out, query, out, logsumexp)
