"""Running sums, products, extrema and log-sum-exps."""

import math

import pytest
import torch

from ort_dynamo.testing import assert_like_eager

inf, nan = math.inf, math.nan


def r(*sizes, dtype=torch.float32):
    return torch.randn(*sizes, dtype=dtype).requires_grad_()


def named(function):
    return function.__name__


@pytest.mark.parametrize("function", [torch.cumsum, torch.cumprod], ids=named)
@pytest.mark.parametrize("dim", [0, -1])
def test_running_sums_and_products_equal_eager(function, dim):
    assert_like_eager(lambda x: function(x, dim), r(5, 7))
    assert_like_eager(
        lambda n, b: (
            function(n, dim),
            function(n.int(), dim),
            function(b, dim),
            function(n, dim, dtype=torch.float32),
        ),
        torch.randint(-3, 4, (3, 4)),
        torch.rand(3, 4) > 0.5,
        gradients=False,
    )


def test_running_sums_of_symbolic_sizes_and_numbers_equal_eager():
    assert_like_eager(lambda x: x.cumsum(1), r(3, 4), dynamic=True)
    assert_like_eager(lambda x: (x.cumsum(0), x.cumprod(0)), torch.tensor(2.0, requires_grad=True))


def test_running_products_of_symbolic_sizes_equal_eager():
    assert_like_eager(lambda x: (x.cumprod(0), x.cumprod(-1)), r(6, 5), dynamic=True)


def test_running_sums_are_as_accurate_as_eager():
    assert_like_eager(lambda x: (x.cumsum(0), (x * 10).cumprod(0)), torch.full((100_000,), 0.1), gradients=False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_running_sums_of_other_dtypes_equal_eager(dtype):
    assert_like_eager(lambda x: (x.cumsum(0), x.cumprod(1), x.logcumsumexp(0)), r(5, 4, dtype=dtype))


@pytest.mark.parametrize("function", [torch.cummax, torch.cummin], ids=named)
def test_running_extrema_equal_eager(function):
    assert_like_eager(lambda x: (function(x, 0), function(x, -1).values), r(7, 5))
    assert_like_eager(lambda x: (function(x, 0), function(x, 1)), r(7, 5), dynamic=True)
    ties = torch.randint(4, (9, 20))
    assert_like_eager(
        lambda n, b: (function(n, 1), function(n.int(), 0), function(n.to(torch.uint8), 0), function(b, 1)),
        ties,
        ties > 1,
        gradients=False,
    )
    x = torch.tensor([1, 1, inf, nan, 2, nan, -inf])
    assert_like_eager(lambda x: (function(x, 0), function(x.flip(0), 0), function(x.half(), 0)), x, gradients=False)
    assert_like_eager(lambda x, y: (function(x, 0), function(y, 0)), torch.tensor(1.0), torch.ones(0), gradients=False)


def test_running_log_sum_exps_equal_eager():
    assert_like_eager(lambda x: (x.logcumsumexp(0), x.logcumsumexp(-1)), r(7, 5))
    assert_like_eager(lambda x: x.logcumsumexp(1), r(3, 4), dynamic=True)
    x = torch.tensor([[-inf, -inf, 1, 2], [inf, 1, -inf, inf], [1, nan, 2, -inf], [-100, 80, 3, 500]])
    assert_like_eager(lambda x: (x.logcumsumexp(0), x.logcumsumexp(1), x[0, 3].logcumsumexp(0)), x, gradients=False)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("shape", [(70, 80), (2, 70, 80), (10007,), (1, 5003), (4097, 1), (5000, 0)], ids=str)
def test_long_running_sums_equal_eager(shape, dynamic):
    def sums(x):
        return x.cumsum(-1), x.cumsum(0), x.cumsum(-1, dtype=torch.float64)

    assert_like_eager(sums, torch.rand(shape, requires_grad=True), dynamic=dynamic)
    numbers = torch.randint(-(2**62), 2**62, shape)
    assert_like_eager(lambda x: (x.cumsum(-1), (x > 0).cumsum(-1)), numbers, gradients=False, dynamic=dynamic)
    assert_like_eager(lambda x: x.cumsum(-1), torch.rand(shape).half() / 64, gradients=False, dynamic=dynamic)


def test_a_long_running_sum_past_infinity_and_nan_equals_eager():
    x = torch.rand(9000)
    x[5000], x[7000], x[8000] = inf, -inf, nan
    assert_like_eager(lambda x: (x.cumsum(0), x.view(3, 3000).cumsum(1)), x, gradients=False)


@pytest.mark.parametrize("size", [1, 7, 8, 9, 64, 65, 1000], ids=str)
@pytest.mark.parametrize("width", [1, 3, 20])
def test_scans_in_blocks_equal_eager(size, width):
    x = torch.randn(2, size, width, requires_grad=True)
    assert_like_eager(lambda x: (x.cumprod(1), x.cummax(1), x.cummin(1), x.logcumsumexp(1)), x, gradients=width == 3)
    n = torch.randint(-3, 4, (2, size, width))
    assert_like_eager(
        lambda n: (n.cumprod(1), n.cummax(1), n.int().cummin(1), (n > 1).cummax(1), (n > 1).cummin(1)), n,
        gradients=False,
    )  # fmt: skip


def test_running_extrema_of_blocks_keep_nan_and_infinities():
    x = torch.randn(3, 40)
    x[0, 11], x[1, 0], x[1, 20], x[2, 30] = nan, -inf, inf, -inf
    x[2, :5] = -inf
    assert_like_eager(lambda x: (x.cummax(1), x.cummin(1), x.cumprod(1), x.logcumsumexp(1)), x, gradients=False)
