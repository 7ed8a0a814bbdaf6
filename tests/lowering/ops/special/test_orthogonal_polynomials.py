"""Orthogonal polynomials whose degrees are data."""

import math

import pytest
import torch

from ort_dynamo.testing import Tolerance, assert_like_eager

NAMES = [
    *(f"{shift}chebyshev_polynomial_{kind}" for shift in ("", "shifted_") for kind in "tuvw"),
    *("hermite_polynomial_h", "hermite_polynomial_he", "laguerre_polynomial_l", "legendre_polynomial_p"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", NAMES)
def test_values_equal_eager(name, dtype):
    function = getattr(torch.special, name)
    x = torch.tensor([[-2.5], [-1.0], [-0.3], [0.0], [0.2], [0.7], [1.0], [1.5]], dtype=dtype)
    n = torch.tensor([-2.0, -0.5, 0.0, 1.0, 2.9, 5.0, 6.0, 7.0, 12.0], dtype=dtype)
    scale = (function(x, n).abs() + 1).double()
    assert_like_eager(lambda x, n: function(x, n) / scale, x, n, gradients=False, tolerance=Tolerance(0, 1e-5))


def test_numbers_as_operands_equal_eager():
    x, n = torch.rand(4) * 2, torch.tensor([0, 3, 9])
    assert_like_eager(
        lambda x, n: (
            torch.special.hermite_polynomial_h(x, 5),
            torch.special.legendre_polynomial_p(1.2, n),
            torch.special.chebyshev_polynomial_u(x[:3], n),
        ),
        x,
        n,
        gradients=False,
    )


def test_degrees_that_are_no_numbers_and_empty_operands_equal_eager():
    x = torch.tensor([0.5, 0.5, 0.5, 3.0])
    n = torch.tensor([math.inf, -math.inf, math.nan, 600.0])
    assert_like_eager(torch.special.hermite_polynomial_h, x, n, gradients=False)
    assert_like_eager(torch.special.laguerre_polynomial_l, x[:0], n[:0], gradients=False)
    # torch leaves the others undefined where the argument is nan.
    assert_like_eager(torch.special.chebyshev_polynomial_t, x * math.nan, torch.arange(4), gradients=False)


def test_symbolic_sizes_equal_eager():
    x, n = torch.rand(3, 5), torch.randint(0, 9, (5,))
    assert_like_eager(torch.special.legendre_polynomial_p, x, n, gradients=False, dynamic=True)
