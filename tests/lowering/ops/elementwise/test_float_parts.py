"""Mantissas and exponents, and neighbouring numbers."""

import math

import pytest
import torch

from ort_dynamo.testing import assert_like_eager

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def numbers(dtype):
    """Every power of two with its neighbours, both signs, subnormal numbers, infinities and NaN."""
    limits = torch.finfo(dtype)
    lowest = math.frexp(limits.smallest_normal * limits.eps)[1] - 1
    exponents = range(lowest, math.frexp(limits.max)[1])
    powers = torch.tensor([math.ldexp(1.0, e) for e in exponents], dtype=torch.float64).to(dtype)
    ends = torch.tensor([0.0, -0.0, limits.max, math.inf, math.nan], dtype=dtype)
    around = [
        powers,
        powers * (1 + limits.eps),
        powers * (1 - limits.eps / 2),
        powers * 1.5,
        ends,
        torch.randn(50).to(dtype),
    ]
    every = torch.cat(around)
    return torch.cat([every, -every])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_mantissa_and_exponent_equal_eager(dtype):
    x = numbers(dtype)
    assert_like_eager(torch.frexp, x, gradients=False)


@pytest.mark.parametrize("dynamic", [False, True])
def test_gradient_of_the_mantissa_equals_eager(dynamic):
    x = torch.randn(3, 5, requires_grad=True)
    assert_like_eager(lambda x: torch.frexp(x).mantissa, x, dynamic=dynamic)
    assert_like_eager(torch.frexp, torch.randn(2, 0), gradients=False, dynamic=dynamic)
    assert_like_eager(torch.frexp, torch.tensor(-3.0), gradients=False, dynamic=dynamic)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_neighbours_equal_eager(dtype):
    x = numbers(dtype)
    towards = torch.tensor([0.0, math.inf, -math.inf, math.nan, 1.0], dtype=dtype)

    def function(x, towards):
        return torch.nextafter(x[:, None], towards), torch.nextafter(x, x), torch.nextafter(x, x.roll(1))

    assert_like_eager(function, x, towards, gradients=False)
    # All of them, for a tolerance would hide the last bit.
    compiled = torch.compile(torch.nextafter, backend="ort_train", fullgraph=True)
    for y in towards:
        expected = torch.nextafter(x, y)
        assert bool(((compiled(x, y) == expected) | expected.isnan()).all())


def test_neighbours_of_symbolic_and_empty_tensors_equal_eager():
    assert_like_eager(torch.nextafter, torch.randn(3, 4), torch.randn(4), gradients=False, dynamic=True)
    assert_like_eager(torch.nextafter, torch.randn(0, 4), torch.randn(4), gradients=False)
