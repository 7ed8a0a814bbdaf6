"""Scaled dot-product attention, forward and backward."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from ort_dynamo.compilation.compiler import Compilation
from ort_dynamo.compilation.events import Listener
from ort_dynamo.options.groups import parse_options
from ort_dynamo.testing import assert_close, assert_like_eager

aten = torch.ops.aten
attend = F.scaled_dot_product_attention
inf = math.inf


def qkv(heads=4, key_heads=None, queries=5, keys=6, width=8, dtype=torch.float32, grad=True):
    """Three operands with the strides that a split of one projection gives."""

    def operand(count, length):
        return torch.randn(2, length, count, width, dtype=dtype).transpose(1, 2).requires_grad_(grad)

    key_heads = key_heads or heads
    return [operand(heads, queries), operand(key_heads, keys), operand(key_heads, keys)]


def masks():
    numbers = torch.randn(5, 6)
    numbers[1], numbers[2, 3] = -inf, -inf
    booleans = torch.rand(2, 1, 5, 6) > 0.5
    booleans[0, 0, 3] = False
    return {
        "numbers": numbers,
        "numbers for each head": torch.randn(2, 4, 5, 6),
        "booleans": booleans,
        "padding": torch.tensor([1, 1, 1, 1, 0, 0]).bool().expand(2, 1, 1, 6),
    }


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    ("lengths", "options"),
    [
        ((5, 6), {}),
        ((5, 6), {"scale": 0.3}),
        ((5, 5), {"is_causal": True}),
        ((4, 7), {"is_causal": True}),
        ((7, 4), {"is_causal": True}),
    ],
    ids=str,
)
def test_attention_and_gradients_equal_eager(lengths, options, dynamic):
    assert_like_eager(
        lambda q, k, v: attend(q, k, v, **options), *qkv(queries=lengths[0], keys=lengths[1]), dynamic=dynamic
    )


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", ["numbers", "numbers for each head", "booleans", "padding"])
def test_masked_attention_with_empty_rows_equals_eager(name, dynamic):
    assert_like_eager(attend, *qkv(), masks()[name], dynamic=dynamic)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"attn_mask": True}], ids=str)
def test_grouped_heads_equal_eager(options, dynamic):
    options = {**options, "attn_mask": masks()["numbers"]} if "attn_mask" in options else options
    assert_like_eager(lambda q, k, v: attend(q, k, v, enable_gqa=True, **options), *qkv(6, 2), dynamic=dynamic)


def test_mask_and_causality_together_equal_eager():
    def function(q, k, v, mask):
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, attn_mask=mask)

    assert_like_eager(function, *qkv(grad=False), masks()["numbers"], gradients=False)


def test_attention_without_gradients_equals_eager():
    assert_like_eager(attend, *qkv(grad=False), gradients=False)
    assert_like_eager(attend, *qkv(grad=False), masks()["booleans"], gradients=False)


@pytest.mark.parametrize("wanted", [0, 1, 2])
def test_one_gradient_alone_equals_eager(wanted):
    operands = [x if i == wanted else x.detach() for i, x in enumerate(qkv())]
    assert_like_eager(attend, *operands)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_attention_of_other_dtypes_equals_eager(dtype):
    assert_like_eager(lambda q, k, v: attend(q, k, v, is_causal=True), *qkv(dtype=dtype))
    assert_like_eager(attend, *qkv(dtype=dtype), masks()["numbers"].to(dtype))


def test_large_scores_do_not_overflow():
    q, k, v = qkv(grad=False)
    assert_like_eager(attend, q * 100, k * 100, v, gradients=False)


def test_a_nan_stays_in_its_row():
    # Without a mask, torch's kernel gives 0 for a row of nan; with one it gives nan.
    q, k, v = qkv(grad=False)
    q[0, 0, 0] = math.nan
    assert_like_eager(attend, q, k, v, masks()["numbers"], gradients=False)


def test_attention_that_torch_decomposes_equals_eager():
    three = [torch.randn(2, length, 8, requires_grad=True) for length in (5, 6, 6)]
    assert_like_eager(attend, *three)
    assert_like_eager(attend, *qkv(), masks()["numbers"].clone().requires_grad_())
    assert_like_eager(lambda q, k, v: attend(q, k, v, dropout_p=0.3), *qkv())


@pytest.mark.parametrize("dynamic", [False, True])
def test_attention_modules_equal_eager(dynamic):
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    assert_like_eager(layer, torch.randn(2, 5, 8, requires_grad=True), dynamic=dynamic)


# -- the operators of other devices, traced on fake tensors and compared with the formula -----------------------------


def efficient(q, k, v, bias, grad, state):
    out, lse, _, _ = aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, True)
    asked = [True, True, True, bias is not None]
    grads = aten._scaled_dot_product_efficient_attention_backward(
        grad, q, k, v, bias, out, lse, state, state, 0.0, asked, True
    )
    return out, lse, *grads[: 3 + (bias is not None)]


def flash(q, k, v, bias, grad, state):
    out, lse = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[:2]
    rest = (None, None, 5, 5, 0.0, True, state, state)
    return out, lse, *aten._scaled_dot_product_flash_attention_backward(grad, q, k, v, out, lse, *rest)


def cudnn(q, k, v, bias, grad, state):
    out, lse = aten._scaled_dot_product_cudnn_attention(q, k, v, bias, True, 0.0, True)[:2]
    rest = (state, state, bias, None, None, 5, 5, 0.0, True)
    return out, lse, *aten._scaled_dot_product_cudnn_attention_backward(grad, q, k, v, out, lse, *rest)


def overrideable(q, k, v, bias, grad, state):
    out, lse = aten._scaled_dot_product_fused_attention_overrideable(q, k, v, bias, 0.0, True)[:2]
    asked = [True, True, True, bias is not None]
    rest = (None, None, 5, 5, 0.0, True, state, state)
    grads = aten._scaled_dot_product_fused_attention_overrideable_backward(grad, q, k, v, bias, asked, out, lse, *rest)
    return out, lse, *grads[: 3 + (bias is not None)]


def run(function, *args):
    """`function` traced on fake tensors and run in ONNX Runtime, no node in eager."""
    gm = make_fx(function, tracing_mode="fake")(*args)
    gm.graph.eliminate_dead_code()
    for node in gm.graph.nodes:
        if isinstance(node.meta.get("val"), tuple):
            # Lengths and uint64 random state, which this test does not read.
            node.meta["val"] = tuple(
                x if isinstance(x, torch.Tensor) and x.dtype != torch.uint64 else None for x in node.meta["val"]
            )
    (output,) = gm.graph.find_nodes(op="output")
    output.args = (tuple(output.args[0]),)
    options = parse_options(None, {"fallback": "error"})
    return Compilation(options, torch.device("cpu"), 1, Listener()).graph(gm, "inference", slice(None))(list(args))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("function", [efficient, flash, cudnn, overrideable])
def test_attention_operators_of_other_devices_equal_the_formula(function, biased):
    if biased and function is flash:
        pytest.skip("has no bias")
    operands = qkv(queries=5, keys=5)
    bias = torch.randn(1, 1, 5, 5).expand(2, 4, 5, 5).contiguous().requires_grad_() if biased else None
    scores = operands[0] @ operands[1].mT / 8**0.5 + torch.full((5, 5), -inf).triu(1)
    scores = scores + bias if biased else scores
    expected = scores.softmax(-1) @ operands[2]
    grad = torch.randn(2, 4, 5, 8)
    wanted = [*operands, bias] if biased and function is not cudnn else operands
    gradients = torch.autograd.grad(expected, wanted, grad)

    def positional(q, k, v, grad, state, *bias):
        return function(q, k, v, bias[0] if bias else None, grad, state)

    given = [x.detach() for x in (*operands, grad, torch.zeros((), dtype=torch.int64), *([bias] if biased else []))]
    out, lse, *actual = run(positional, *given)
    assert_close(out, expected.detach(), "output", strides=False)
    assert_close(lse.flatten(2)[:, :, :5], scores.detach().logsumexp(-1), "logsumexp", strides=False)
    for index, (mine, theirs) in enumerate(zip(actual, gradients, strict=True)):
        assert_close(mine, theirs, f"gradient {index}", strides=False)


def test_dropout_inside_a_fused_attention_is_refused():
    def function(q, k, v):
        return aten._scaled_dot_product_efficient_attention(q, k, v, None, False, 0.1)[:1]

    with pytest.raises(Exception, match="fused attention with dropout is not supported"):
        run(function, *qkv(grad=False))


# -- modules on their fast paths, without gradients --------------------------------------------------------------------


@pytest.mark.parametrize(("activation", "norm_first"), [("relu", False), ("gelu", True)])
def test_an_encoder_layer_that_does_not_train_equals_eager(activation, norm_first):
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, activation=activation, norm_first=norm_first, batch_first=True)
    layer = layer.eval().requires_grad_(False)
    assert_like_eager(layer, torch.randn(2, 5, 8), gradients=False)


def test_masks_of_an_encoder_layer_that_does_not_train_equal_eager():
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval().requires_grad_(False)
    padding = torch.zeros(3, 5).masked_fill(torch.tensor([[0] * 5, [0, 0, 1, 1, 1], [1] * 5]).bool(), -inf)
    causal = torch.nn.Transformer.generate_square_subsequent_mask(5)

    def function(x):
        return (
            layer(x, src_key_padding_mask=padding),
            layer(x, src_mask=causal, is_causal=True),
            layer(x, causal, padding),
        )

    assert_like_eager(function, torch.randn(3, 5, 8), gradients=False)


def test_the_fused_attention_module_equals_eager():
    module = torch.nn.MultiheadAttention(8, 2, batch_first=True).requires_grad_(False)
    padding = torch.tensor([[False] * 5, [False, False, True, True, True]])

    def function(x):
        weights = (module.in_proj_weight, module.in_proj_bias, module.out_proj.weight, module.out_proj.bias)
        return [
            torch._native_multi_head_attention(x, x, x, 8, 2, *weights, padding, True, average, 1)
            for average in (False, True)
        ]

    assert_like_eager(function, torch.randn(2, 5, 8), gradients=False)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_mask_that_needs_a_gradient_equals_eager(dropout):
    def function(q, k, v, *masks):
        return [attend(q, k, v, mask, dropout) for mask in masks]

    masks = [torch.randn(sizes, requires_grad=True) for sizes in ((5, 6), (2, 1, 1, 6), (2, 4, 5, 6))]
    assert_like_eager(function, *qkv(), *masks)
