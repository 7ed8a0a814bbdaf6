"""Indices into a sorted sequence."""

import math

import pytest
import torch

from ort_dynamo.testing import assert_like_eager

t = torch.tensor
inf, nan = math.inf, math.nan
SEARCHED = t([[0.1, nan, 0.5], [2, -1, inf]])


@pytest.mark.parametrize("dynamic", [False, True])
def test_bucketize_equals_eager(dynamic):
    def function(x, i, b):
        return torch.bucketize(x, b), torch.bucketize(x, b, right=True, out_int32=True), torch.bucketize(i, b)

    assert_like_eager(function, SEARCHED, t([0, 1, 2]), t([0.1, 0.5, 2]), gradients=False, dynamic=dynamic)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("size", [1, 33, 64, 100])
def test_search_in_a_long_list_equals_eager(size, dynamic):
    def function(x, b):
        return torch.searchsorted(b, x), torch.searchsorted(b, x, right=True), torch.bucketize(x[0], b, out_int32=True)

    boundaries = torch.randint(50, (size,)).sort().values.float()
    x = torch.cat([torch.randint(-2, 53, (4, 9)).float(), t([[nan, inf, -inf] * 3])])
    assert_like_eager(function, x, boundaries, gradients=False, dynamic=dynamic)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("size", "many"), [(1, 1), (2, 1), (3, 1), (5, 1), (5, 3), (32, 2), (32, 32), (40, 25)])
def test_search_in_a_list_that_ends_in_nan_equals_eager(size, many, dtype):
    """Equals what eager's bisection finds, which may be the end of the list for any entry."""

    def function(x, b):
        lists = b.expand(2, -1).contiguous()
        return torch.searchsorted(b, x[0]), torch.searchsorted(lists, x, right=True), torch.bucketize(x, b)

    boundaries = torch.cat([torch.arange(size - many), t([nan] * many)]).to(dtype)
    x = t([[-1, 0, 0.5, size / 2], [size - 2, size, inf, nan]], dtype=dtype)
    assert_like_eager(function, x, boundaries, gradients=False)


@pytest.mark.parametrize("size", [5, 40])
def test_search_in_lists_of_their_own_equals_eager(size):
    def function(x, b, order):
        ordered = b.gather(-1, order)
        plain = torch.searchsorted(ordered, x, side="right"), torch.searchsorted(ordered[0, 0], 7)
        own = b.flip(-1)  # a list in which its own values are searched
        by_sorter = torch.searchsorted(own, own, sorter=own.argsort(-1))
        return *plain, torch.searchsorted(b, x, sorter=order), by_sorter

    b = torch.randint(30, (2, 3, size))
    assert_like_eager(function, torch.randint(30, (2, 3, 4)), b, b.argsort(-1), gradients=False)
    assert_like_eager(function, torch.randint(30, (2, 3, 4)), b, b.argsort(-1), gradients=False, dynamic=True)


def test_search_of_and_in_nothing_equals_eager():
    def function(x, b, c):
        return torch.bucketize(x, b), torch.bucketize(b, x[0]), torch.bucketize(c, x[0]), torch.searchsorted(c, b)

    assert_like_eager(function, torch.rand(1, 3), torch.rand(0), torch.rand(5, 0, 2)[0, 0:0, 0], gradients=False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int32, torch.uint8], ids=str)
def test_search_of_other_dtypes_equals_eager(dtype):
    b, x = torch.arange(0, 80, 2).to(dtype), torch.randint(90, (3, 4)).to(dtype)
    assert_like_eager(lambda x, b: (torch.bucketize(x, b), torch.searchsorted(b[:9], x)), x, b, gradients=False)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("number", [2.5, -0.5, 0.1, 3, inf])
def test_search_of_a_number_equals_eager(dtype, number):
    b = torch.tensor([0.1, 0.2, 1, 2, 3, 4]).to(dtype)
    assert_like_eager(
        lambda b: (torch.bucketize(number, b), torch.searchsorted(b, number, right=True)), b, gradients=False
    )


def test_search_of_a_scalar_of_another_dtype_equals_eager():
    b = torch.tensor([0.1, 0.2, 0.3])
    scalars = [torch.tensor(0.2, dtype=dtype) for dtype in (torch.float64, torch.float16)]
    assert_like_eager(lambda b, *x: [torch.bucketize(one, b) for one in x], b, *scalars, gradients=False)
