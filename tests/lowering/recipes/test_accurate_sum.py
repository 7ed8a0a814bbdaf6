"""Sums of many numbers are as accurate as torch's, whichever lowering makes them."""

import onnx
import pytest
import sympy
import torch
import torch.nn.functional as F
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ort_dynamo.lowering.symbols import expression, factors
from ort_dynamo.testing import Tolerance, assert_close

LIMIT = Tolerance(4e-6, 0)
"""ONNX Runtime's own sums of these sizes, of equal numbers, have errors of 1e-5 to 4e-3."""


def plane(*sizes):
    # Equal numbers round the same way at each step: errors add up instead of cancelling.
    return torch.full(sizes, 0.1)


CASES = {
    "sum of squared errors": (lambda x: F.mse_loss(x, torch.zeros_like(x), reduction="sum"), (1 << 20,)),
    "mean of errors that broadcast": (lambda x: F.smooth_l1_loss(x, x[:1] * 0), (1024, 1024)),
    "negative log-likelihood": (lambda x: F.nll_loss(x, torch.zeros(x.shape[0], dtype=torch.int64)), (1 << 18, 2)),
    "variance of channels": (lambda x: F.batch_norm(x + x, None, None, training=True), (1, 2, 700, 700)),
    "variance of groups": (lambda x: F.group_norm(x + x, 1), (2, 2, 500, 500)),
}


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("name", CASES)
def test_forward_sums_are_accurate(name):
    function, sizes = CASES[name]
    x = plane(*sizes)
    if len(sizes) == 4:
        x.flatten()[::2] += 0.01  # normalization needs a spread
    exact = function(x.double()).float()
    compiled = torch.compile(function, backend="ort_train", fullgraph=True, options={"fallback": "error"})
    limit = Tolerance(2e-5, 0) if len(sizes) == 4 else LIMIT
    assert_close(compiled(x), exact, name, limit)


@pytest.mark.parametrize(
    ("function", "sizes", "weights"),
    [
        (lambda x, w: F.layer_norm(x, (16,), w, w), (1 << 15, 16), 16),
        (lambda x, w: F.group_norm(x, 2, w, w), (2, 4, 500, 500), 4),
        (lambda x, w: F.batch_norm(x, None, None, w, w, training=True), (2, 4, 500, 500), 4),
        (lambda x, w: F.conv2d(x, w.reshape(4, 4, 1, 1).detach(), w.flatten()[:4]), (2, 4, 500, 500), (4, 4)),
    ],
    ids=["layer norm", "group norm", "batch norm", "convolution"],
)
def test_gradients_of_weights_are_accurate(function, sizes, weights):
    x = torch.rand(sizes, generator=torch.Generator().manual_seed(0))
    weight = torch.ones(weights, requires_grad=True)
    cotangent = plane(*sizes)

    def total(x, weight, cotangent):
        return (function(x, weight) * cotangent).sum()

    def gradient(call, dtype):
        leaf = weight.detach().to(dtype).requires_grad_()
        return torch.autograd.grad(call(x.to(dtype), leaf, cotangent.to(dtype)), leaf)[0].float()

    exact = gradient(total, torch.float64)
    compiled = torch.compile(total, backend="ort_train", fullgraph=True, options={"fallback": "error"})
    assert_close(gradient(compiled, torch.float32), exact, "the gradient", LIMIT)


@pytest.mark.parametrize(
    ("function", "sizes"),
    [(lambda x: x.sum(0), (1000003, 2)), (lambda x: (x * x).mean((0, 2), keepdim=True), (3, 2, 300007))],
    ids=["sum of rows", "mean"],
)
def test_sums_of_a_prime_number_of_numbers_are_accurate(function, sizes):
    x = plane(*sizes)
    compiled = torch.compile(function, backend="ort_train", fullgraph=True, options={"fallback": "error"})
    # In one stage they are off by 1e-2 and 2e-4.
    assert_close(compiled(x), function(x.double()).float(), "the sum", Tolerance(2e-5, 0))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    ("function", "sizes"),
    [
        (lambda x: F.group_norm(x, 2), (2, 4, 900, 1100)),
        (lambda x: F.instance_norm(x), (1, 2, 900, 1100)),
        (lambda x: x.flatten(1).logsumexp(1), (2, 900, 1100)),
    ],
    ids=["group norm", "instance norm", "logsumexp"],
)
def test_sums_over_a_product_of_symbolic_sizes_are_accurate(function, sizes, dynamic):
    x = torch.rand(sizes, generator=torch.Generator().manual_seed(0)) + 0.1
    exact = function(x.double()).float()
    compiled = torch.compile(function, backend="ort_train", fullgraph=True, dynamic=dynamic)
    assert_close(compiled(x), exact, "the result", LIMIT)


@pytest.mark.parametrize("count", [1 << 21, 2000003])
@pytest.mark.parametrize("function", [F.layer_norm, F.rms_norm], ids=["layer norm", "root-mean-square norm"])
def test_normalizations_over_millions_are_accurate(function, count):
    x = torch.rand(2, count, generator=torch.Generator().manual_seed(0)) + 0.1
    cotangent = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))

    def run(call, dtype):
        leaf = x.to(dtype).requires_grad_()
        y = call(leaf, (count,))
        return y.detach().float(), torch.autograd.grad(y, leaf, cotangent.to(dtype))[0].float()

    compiled = torch.compile(function, backend="ort_train", fullgraph=True, options={"fallback": "error"})
    for mine, exact, what in zip(
        run(compiled, torch.float32), run(function, torch.float64), ("result", "gradient"), strict=True
    ):
        assert_close(mine, exact, f"the {what}", LIMIT)


@pytest.mark.parametrize(
    ("function", "sizes"),
    [
        (lambda x: x.sum(), (2000003,)),
        (lambda x: x.sum(1, keepdim=True), (2, 1 << 20, 2)),
        (lambda x: x.var(), (1 << 21,)),
        (lambda x: F.layer_norm(x, x.shape[1:]), (2, 1 << 21)),
        (lambda x: x.abs().logsumexp(0), (2000003,)),
        (lambda x: torch.linalg.vector_norm(x, 1, 0), (2000003,)),
    ],
    ids=["all", "columns", "variance", "layer norm", "logsumexp", "norm"],
)
def test_sums_over_one_symbolic_size_are_accurate(function, sizes):
    compiled = torch.compile(function, backend="ort_train", fullgraph=True, dynamic=True)
    for x in (plane(*sizes), torch.rand([min(size, 7) for size in sizes])):
        x.flatten()[::3] += 0.2  # normalization needs a spread
        # In one stage, the long ones are off by 1e-4 to 1e-2.
        assert_close(compiled(x), function(x.double()).float(), "the result", Tolerance(2e-5, 1e-6))


@pytest.mark.parametrize(("axes", "count"), [((0,), 0), ((0, 1), 0), ((1,), 1), ((0, 1, 2), 0)])
def test_only_the_sum_over_one_symbolic_size_asks_how_long_it_is(axes, count, tmp_path):
    run = torch.compile(lambda x: x.sum(axes), backend="ort_train", dynamic=True, options={"save_onnx": tmp_path})
    run(torch.randn(5, 6, 7))
    (path,) = tmp_path.glob("*.onnx")
    assert sum(node.op_type == "If" for node in onnx.load(path).graph.node) == count


def test_the_factors_of_a_symbolic_size_multiply_to_it():
    environment = ShapeEnv()
    a, b = (environment.create_unbacked_symint() for _ in range(2))
    for size in (a * b * 48, a * a * b, (a + 1) * (b // 3 + 1), a + b, 2 * a + 2 * b):
        found = factors(size)
        assert sympy.expand(sympy.Mul(*map(expression, found)) - expression(size)) == 0
    assert len(factors(a * a * b * 48)) == 4
    assert factors(48) == [48]
