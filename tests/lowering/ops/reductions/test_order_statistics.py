"""Medians, modes and k-th smallest values."""

import math

import pytest
import torch

from ort_dynamo.testing import assert_like_eager

t = torch.tensor
inf, nan = math.inf, math.nan
WITH_NAN = t([[1.0, nan, 3, -inf, inf], [2, 0, 7, 5, 1], [nan, nan, nan, nan, nan], [inf, nan, inf, nan, 2]])


def r(*sizes, dtype=torch.float32):
    return torch.randn(*sizes, dtype=dtype).requires_grad_()


@pytest.mark.parametrize("dynamic", [False, True])
def test_kthvalue_and_gradient_equal_eager(dynamic):
    assert_like_eager(lambda x: (x.kthvalue(2, 1), x.kthvalue(3, keepdim=True)), r(5, 4, 6), dynamic=dynamic)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("function", [torch.median, torch.nanmedian])
def test_medians_and_gradients_equal_eager(function, dynamic):
    def medians(x):
        return function(x), function(x, 0), function(x, 1, keepdim=True), function(x, -1)

    assert_like_eager(medians, r(5, 4, 6), dynamic=dynamic)


def test_medians_along_an_axis_and_of_all_equal_eager_in_one_graph():
    def medians(x):
        return x.median(0).values.sum() + x.median(), x.median(0).indices  # FX nodes `median` and `median_1`

    assert_like_eager(medians, r(5, 4))


@pytest.mark.parametrize("function", [torch.median, torch.nanmedian])
def test_medians_of_nan_equal_eager(function):
    values = lambda x: (function(x), function(x, 1).values, function(x, 0).values, function(x[1:3]))  # noqa: E731
    assert_like_eager(values, WITH_NAN, gradients=False)
    assert_like_eager(lambda x: function(x, 1), WITH_NAN[:2], gradients=False)
    assert_like_eager(values, WITH_NAN.half(), gradients=False)


@pytest.mark.parametrize("function", [torch.median, torch.nanmedian])
def test_medians_of_other_dtypes_equal_eager(function):
    x = torch.randperm(30).reshape(5, 6)
    dtypes = (torch.int64, torch.int32, torch.uint8, torch.float64, torch.bfloat16)
    assert_like_eager(lambda x: [(function(x.to(d), 1), function(x.to(d))) for d in dtypes], x, gradients=False)


def test_medians_of_numbers_and_nothing_equal_eager():
    def function(x, y):
        return x.median(), x.median(0), x.nanmedian(0), y.median(), y.nanmedian(), y.median(1), y.mode(1), x.mode()

    assert_like_eager(function, t(2.0), torch.empty(0, 3), gradients=False)


@pytest.mark.parametrize("dynamic", [False, True])
def test_modes_and_gradients_equal_eager(dynamic):
    x = torch.randint(4, (5, 4, 12)).float().requires_grad_()
    assert_like_eager(lambda x: (x.mode(), x.mode(0), x.mode(1, True)), x, dynamic=dynamic)


def test_modes_of_other_dtypes_equal_eager():
    x = torch.randint(3, (5, 9))
    dtypes = (torch.int64, torch.int32, torch.uint8, torch.bool, torch.float64, torch.float16)
    assert_like_eager(lambda x: [x.to(d).mode(1) for d in dtypes], x, gradients=False)


@pytest.mark.parametrize("interpolation", ["linear", "lower", "nearest", "midpoint"])
def test_quantiles_and_gradients_equal_eager(interpolation):
    def function(x, q):
        quantiles = torch.quantile(x, q, 1, interpolation=interpolation)
        return quantiles, torch.nanquantile(x, 0.4, interpolation=interpolation)

    assert_like_eager(function, r(4, 7), t([0.1, 0.5, 0.9]))
    assert_like_eager(function, WITH_NAN, t([0.1, 0.5, 0.9]), gradients=False)
