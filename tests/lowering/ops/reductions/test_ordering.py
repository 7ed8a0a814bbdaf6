"""Sorting, positions of extremes, and reversals."""

import math

import pytest
import torch

from ort_dynamo.testing import assert_like_eager

t = torch.tensor
inf, nan = math.inf, math.nan
DTYPES = [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]


def r(*sizes, dtype=torch.float32):
    return torch.randn(*sizes, dtype=dtype).requires_grad_()


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("largest", [True, False])
def test_topk_and_gradient_equal_eager(largest, dynamic):
    def function(x):
        return x.topk(2, 1, largest=largest), x.topk(3, largest=largest), x.topk(1, 0, largest=largest)

    assert_like_eager(function, r(5, 4, 6), dynamic=dynamic)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("descending", [True, False])
def test_sort_and_gradient_equal_eager(descending, dynamic):
    def function(x):
        return x.sort(1, descending), x.sort(descending=descending), x.argsort(0, descending)

    assert_like_eager(function, r(5, 4, 6), dynamic=dynamic)


@pytest.mark.parametrize("descending", [True, False])
def test_equal_values_keep_their_order(descending):
    x = torch.randint(3, (4, 50)).float()
    assert_like_eager(lambda x: torch.sort(x, dim=1, descending=descending, stable=True), x, gradients=False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ordering_of_every_dtype_equals_eager(dtype):
    x = torch.randperm(24).reshape(4, 6).to(dtype)
    assert_like_eager(
        lambda x: (x.sort(1), x.sort(0, True), x.topk(2, 1), x.argmax(1), x.argmin(), x.argmax(0, True), x.kthvalue(3)),
        x,
        gradients=False,
    )


def test_sort_of_bool_equals_eager():
    assert_like_eager(lambda x: torch.sort(x, stable=True, dim=0), torch.rand(6, 4) > 0.5, gradients=False)


def test_nan_is_the_greatest_number():
    x = t([[1.0, nan, 3, -inf], [2, 0, nan, 5]])
    assert_like_eager(
        lambda x: (x.sort(1), x.sort(1, True), x.topk(2, 1), x.topk(3, 1, largest=False), x.kthvalue(4, 1)),
        x,
        gradients=False,
    )


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("function", [torch.argmax, torch.argmin])
def test_positions_of_extremes_equal_eager(function, dynamic):
    x = torch.randint(9, (5, 4, 6)).float()  # of equal values the first one counts

    def results(x):
        return function(x), function(x, 1), function(x, -1, keepdim=True), function(x, keepdim=True)

    assert_like_eager(results, x, gradients=False, dynamic=dynamic)


def test_the_first_nan_is_the_extreme():
    x = t([[3, 1, nan, 2], [1, nan, 5, nan], [1, 2, 2, 0], [-inf, inf, inf, -inf]])
    assert_like_eager(lambda x: (x.argmax(1), x.argmin(1), x.argmax(), x.argmin(0, keepdim=True)), x, gradients=False)


def test_nan_and_infinity_do_not_mix():
    x = t([[nan, inf, 1, nan, inf], [inf, nan, -inf, inf, nan], [nan, nan, nan, nan, nan], [1, 2, inf, 0, -inf]])

    def function(x):
        return (
            x.sort(1),
            x.sort(stable=True, dim=1, descending=True),
            x.argmax(1),
            x.argmin(1),
            x.topk(3, 0),
            x.argmax(),
        )

    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        assert_like_eager(function, x.to(dtype), gradients=False)
    assert_like_eager(function, x, gradients=False, dynamic=True)


def test_numbers_equal_eager():
    s = t(3.5, requires_grad=True)
    assert_like_eager(lambda s: (s.topk(1), s.sort(), s.flip(0), s.roll(1), s.kthvalue(1)), s)
    assert_like_eager(lambda s: (s.argmax(), s.argmin(0), s.argsort(), s.argmax(0, True)), s.detach(), gradients=False)


def test_ordering_of_nothing_equals_eager():
    def function(x, y):
        return x.sort(0), x.sort(1), y.topk(0, 1), x.flip(0), x.roll(1, 0), x.roll(1), x.argmax(1)

    assert_like_eager(function, torch.empty(0, 3), torch.empty(3, 0), gradients=False)


@pytest.mark.parametrize("dynamic", [False, True])
def test_reversals_and_gradients_equal_eager(dynamic):
    def function(x):
        return x.flip(0), x.flip(0, -1), x.flip(()), x.fliplr()

    assert_like_eager(function, r(5, 4, 6), dynamic=dynamic)


@pytest.mark.parametrize("dynamic", [False, True])
def test_roll_and_gradient_equal_eager(dynamic):
    def function(x):
        return x.roll(1, 0), x.roll((1, -2), (0, 2)), x.roll(7, 1), x.roll(-5), x.roll(0, 1), x.roll((1, 2), (1, 1))

    assert_like_eager(function, r(5, 4, 6), dynamic=dynamic)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bool], ids=str)
def test_reversals_of_every_dtype_equal_eager(dtype):
    assert_like_eager(lambda x: (x.flip(1), x.roll(1, 0)), torch.arange(6).reshape(2, 3).to(dtype), gradients=False)
