"""Softmax, log-softmax, log-sum-exp and their gradients."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from ort_dynamo.compilation.compiler import Compilation
from ort_dynamo.compilation.events import Listener
from ort_dynamo.options.groups import parse_options
from ort_dynamo.testing import assert_close, assert_like_eager

inf, nan = math.inf, math.nan

EDGES = torch.tensor([[1.0, 2, -inf], [-inf, -inf, -inf], [inf, 0, 1], [nan, 0, 1], [-1e4, 0, 3e38], [-3e38, -inf, 0]])


def r(*sizes, dtype=torch.float32):
    return (3 * torch.randn(*sizes, dtype=dtype)).requires_grad_()


@pytest.mark.parametrize("function", [F.softmax, F.log_softmax])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_softmax_and_gradient_equal_eager(function, dim):
    assert_like_eager(lambda x: function(x, dim), r(3, 4, 5))
    assert_like_eager(lambda x: function(x, dim), r(3, 4, 5), dynamic=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_softmax_of_other_dtypes_equals_eager(dtype):
    def function(x):
        return F.softmax(x, -1), F.log_softmax(x, 0), torch.logsumexp(x, 1)

    assert_like_eager(function, r(7, 11, dtype=dtype))


def test_softmax_that_widens_half_equals_eager():
    def function(x):
        return F.softmax(x, -1, dtype=torch.float32), F.log_softmax(x, 0, dtype=torch.float32)

    assert_like_eager(function, r(4, 5, dtype=torch.float16))


@pytest.mark.parametrize("operator", [torch.ops.aten._softmax.default, torch.ops.aten._log_softmax.default])
def test_half_to_float_gives_float32(operator):
    # Only CUDA has the operators in this form, so the graph is made by hand.
    x = torch.randn(4, 5).half()
    graph = torch.fx.Graph()
    node = graph.placeholder("x")
    result = graph.call_function(operator, (node, -1, True))
    graph.output((result,))
    with FakeTensorMode():
        node.meta["val"], result.meta["val"] = torch.empty(4, 5, dtype=torch.float16), torch.empty(4, 5)
    gm = torch.fx.GraphModule(torch.nn.Module(), graph)
    options = parse_options(None, {"fallback": "error"})
    (actual,) = Compilation(options, x.device, 1, Listener()).graph(gm, "inference", slice(None))([x])
    expected = operator(x.float(), -1, False)
    assert_close(actual, expected, "result")


def test_softmax_of_a_number_equals_eager():
    assert_like_eager(
        lambda x: (F.softmax(x, 0), F.log_softmax(x, -1), torch.logsumexp(x, 0)), torch.tensor(2.5, requires_grad=True)
    )


def test_softmax_of_infinities_and_nan_equals_eager():
    assert_like_eager(
        lambda x: (
            F.softmax(x, -1),
            F.log_softmax(x, -1),
            F.softmax(x, 0),
            torch.logsumexp(x, 1),
            torch.logsumexp(x, 0),
        ),
        EDGES,
        gradients=False,
    )


@pytest.mark.parametrize("shape", [(0, 3), (3, 0)])
def test_softmax_of_nothing_equals_eager(shape):
    def function(x):
        return F.softmax(x, -1), F.log_softmax(x, 0), torch.logsumexp(x, 0), torch.logsumexp(x, (0, 1))

    assert_like_eager(function, torch.randn(shape, requires_grad=True))


def test_safe_softmax_gives_zeros_for_masked_rows():
    x = EDGES[:4].clone().requires_grad_()
    assert_like_eager(lambda x: torch.ops.aten._safe_softmax(x, -1), x.detach(), gradients=False)
    assert_like_eager(lambda x: torch.ops.aten._safe_softmax(x, 0, torch.float64), x.detach(), gradients=False)
    assert_like_eager(lambda x: torch.ops.aten._safe_softmax(x, -1), EDGES[:2].clone().requires_grad_(), dynamic=True)


@pytest.mark.parametrize("dynamic", [False, True])
def test_safe_softmax_of_rows_that_are_masked_in_part_equals_eager(dynamic):
    x = torch.cat([torch.randn(1, 4, 40), torch.full((1, 4, 40), -inf)])
    x[0, 0, 5:], x[0, 1, 39], x[0, 2, 3], x[0, 3, 7:9] = -inf, nan, inf, -90
    x[1, 1, 39], x[1, 2, 0], x[1, 3, 20] = nan, 3e38, -3e38
    assert_like_eager(lambda x: torch.ops.aten._safe_softmax(x, -1), x, gradients=False, dynamic=dynamic)
    masked = torch.randn(2, 4, 40).masked_fill(torch.arange(40) > 20, -inf).requires_grad_()
    assert_like_eager(lambda x: torch.ops.aten._safe_softmax(x, -1), masked, dynamic=dynamic)
    assert_like_eager(lambda x: torch.ops.aten._safe_softmax(x, -1), masked.detach().bfloat16(), gradients=False)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0)])
def test_safe_softmax_of_nothing_equals_eager(shape):
    assert_like_eager(lambda x: torch.ops.aten._safe_softmax(x, -1), torch.randn(shape), gradients=False)


@pytest.mark.parametrize("dim", [0, (0, -1), (1,), (0, 1, 2)])
@pytest.mark.parametrize("keepdim", [False, True])
def test_logsumexp_equals_eager(dim, keepdim):
    assert_like_eager(lambda x: torch.logsumexp(x, dim, keepdim), r(3, 4, 5), dynamic=keepdim)


def test_logsumexp_of_integers_equals_eager():
    assert_like_eager(lambda x: torch.logsumexp(x, 0), torch.tensor([[1, 2], [3, 4]]), gradients=False)


def test_logsumexp_of_large_numbers_does_not_overflow():
    assert_like_eager(
        lambda x: torch.logsumexp(x, 1), torch.tensor([[1000.0, 1001], [-1000, -1001]], requires_grad=True)
    )


def test_log_sum_exps_of_nothing_but_minus_infinity_equal_eager():
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([[-inf, -inf], [-inf, nan], [-inf, 1], [inf, -inf], [inf, nan]])

    def function(x):
        return x.logsumexp(1), x.logsumexp(0, True), x.log_softmax(1), x.softmax(0)

    for dtype in (torch.float32, torch.float64):
        assert_like_eager(function, x.to(dtype), gradients=False)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("function", [F.softmax, F.log_softmax])
def test_softmax_across_rows_equals_eager(function, dynamic):
    def edges(x):
        return function(x, 0), function(x.T[None], 1)

    assert_like_eager(edges, EDGES, gradients=False, dynamic=dynamic)
    assert_like_eager(lambda x: function(x, -2), r(2, 3, 40, 30), dynamic=dynamic)
    assert_like_eager(lambda x: function(x, 1), r(2, 5000, 3), dynamic=dynamic)
    assert_like_eager(lambda x: function(x, 0), r(6, 5, dtype=torch.float16), dynamic=dynamic)
