"""Histograms of one and of several dimensions; Dynamo captures none with symbolic sizes."""

import math

import pytest
import torch

from ort_dynamo.testing import assert_like_eager

nan = math.nan


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_histograms_equal_eager(dtype):
    def function(x):
        return x.histc(), x.histc(7, -1, 1.5), torch.zeros_like(x).histc(3), x[:0].histc(4), torch.histc(x, 5, 2, 3)

    assert_like_eager(function, torch.randn(40, 9, dtype=dtype), gradients=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_histograms_of_equal_numbers_equal_eager(dtype):
    def function(*rows):
        return [row.histc(4) for row in rows]

    # 1 away, the sum with 1 is the number itself, or no number.
    limits = torch.finfo(dtype)
    powers = [2.0**power + shift for power in (22, 23, 24, 52, 53, 54, 100) for shift in (-1, 0, 2)]
    numbers = [0.3, 1e10, -3e38, limits.tiny, limits.max, limits.min, *powers]
    assert_like_eager(function, *(torch.full((3,), number, dtype=dtype) for number in numbers), gradients=False)


@pytest.mark.parametrize("share", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_histogram_of_a_range_that_overflows_equals_eager(dtype, share):
    end = torch.finfo(dtype).max / share
    assert_like_eager(lambda x: x.histc(4), torch.tensor([-end, 0, end], dtype=dtype), gradients=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_histograms_of_even_bins_equal_eager(dtype):
    def function(x, weight):
        plain, ranged = torch.histogram(x, 7), torch.histogram(x, 40, range=(-1, 1.5))
        weighed = torch.histogram(x, 5, weight=weight), torch.histogram(x, 5, weight=weight, density=True)
        return *plain, *ranged, *weighed[0], *weighed[1], *torch.histogram(torch.zeros_like(x), 3)

    x = torch.randn(40, 9, dtype=dtype)
    assert_like_eager(function, x, torch.rand(40, 9, dtype=dtype), gradients=False)


def test_histograms_of_given_bins_equal_eager():
    def function(x, few, many, weight):
        some = torch.histogram(x, few), torch.histogram(x, few, density=True), torch.histogram(x, many, weight=weight)
        return [part for one in some for part in one]

    # Ends of bins, an empty bin, and values in no bin.
    x = torch.tensor([[0.0, 2, 2, 3.5, 6], [-1, 7, nan, math.inf, -math.inf], [4, 5, 1, 1, 0.5]])
    few, many = torch.tensor([0.0, 2, 2, 4, 6]), torch.linspace(-2, 5, 50)
    assert_like_eager(function, x, few, many, torch.rand(3, 5), gradients=False)


def test_histograms_of_nothing_and_of_one_number_equal_eager():
    def function(x, y):
        some = torch.histogram(x, 2), torch.histogram(x, 2, density=True), torch.histogram(y, 3, range=(1, 1))
        return [part for one in some for part in one]

    assert_like_eager(function, torch.rand(0), torch.tensor(1.0), gradients=False)


def test_histograms_of_points_equal_eager():
    def function(x, weight, a, b, c):
        some = [
            torch.histogramdd(x, [2, 3, 40]),
            torch.histogramdd(x, [2, 3, 4], range=[-1, 1, 0, 1, 0, 2], weight=weight, density=True),
            torch.histogramdd(x, [a, b, c]),
            torch.histogramdd(x, [a, b, c], weight=weight, density=True),
            torch.histogramdd(x[:0], [2, 1, 2]),
        ]
        return [one.hist for one in some] + [edge for one in some for edge in one.bin_edges]

    edges = torch.tensor([-1.0, 0, 1]), torch.linspace(-1, 1, 50), torch.tensor([0.0, 0.2, 0.4, 1])
    assert_like_eager(function, torch.randn(30, 3), torch.rand(30), *edges, gradients=False)


@pytest.mark.parametrize("span", [(-1, 2), (0, 0), (4, 4)])
def test_a_histogram_with_a_symbolic_range_equals_eager(span):
    assert_like_eager(lambda x, low, high: x.histc(5, low, high), torch.randn(40), *span, gradients=False, dynamic=True)


def test_a_histogram_whose_range_is_reversed_raises_as_in_eager():
    with pytest.raises(RuntimeError, match="max must be larger than min"):
        torch.compile(lambda x: x.histc(5, 3, 1), backend="ort_train")(torch.randn(4))
