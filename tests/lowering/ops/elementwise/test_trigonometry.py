"""Circular and hyperbolic functions and their inverses in float64; in float32 they are among test_unary's."""

import math

import pytest
import torch

from ort_dynamo.testing import Tolerance, assert_close, assert_like_eager

FUNCTIONS = [torch.sin, torch.cos, torch.tan, torch.asin, torch.acos, torch.atan, torch.sinh, torch.cosh, torch.asinh,
             torch.acosh, torch.atanh]  # fmt: skip
EDGES = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1e-9, -1e-9, 1e-200, -1e-200, 1.5, -2.5, 40.0, 700.0, -709.5, 3e4, math.inf,
         -math.inf, math.nan]  # fmt: skip


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_float64_values_and_gradients_equal_eager(function):
    x = torch.tensor(EDGES, dtype=torch.float64)
    if function in (torch.asinh, torch.acosh):
        x = torch.cat([x, torch.tensor([1e200, -1e200], dtype=torch.float64)])
    inside = torch.rand(3, 5, dtype=torch.float64) * 0.9 + (1.01 if function is torch.acosh else 0.05)
    assert_like_eager(lambda a, b: (function(a), function(b)), x, inside.requires_grad_())


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_small_and_large_values_keep_their_digits(function):
    x = torch.cat([torch.logspace(-15, -0.01, 60, dtype=torch.float64), torch.logspace(0.01, 2, 20).double()])
    expected = function(x)
    actual = torch.compile(function, backend="ort_train", fullgraph=True)(x)
    kept = expected.isfinite()
    assert_close(actual.isfinite(), kept, "finite values")
    # Near a root of sin, cos or tan the error is absolute.
    scale = expected.abs().clamp_min(1) if function in (torch.sin, torch.cos, torch.tan) else expected.abs()
    assert_close(actual[kept] / scale[kept], expected[kept] / scale[kept], "ratio", Tolerance(0, 1e-13))


def test_symbolic_sizes_equal_eager():
    x = torch.rand(3, 5, dtype=torch.float64, requires_grad=True)
    assert_like_eager(lambda x: (torch.atan2(x, x - 0.5), torch.asinh(x), torch.cosh(x)), x, dynamic=True)


@pytest.mark.parametrize("function", [torch.tan, torch.sinh, torch.cosh, torch.asinh, torch.acosh, torch.atanh],
                         ids=lambda function: function.__name__)  # fmt: skip
def test_each_value_keeps_its_digits(function):
    sizes = torch.logspace(-20, 1.9, 3000)
    x = torch.cat([sizes, -sizes, torch.linspace(-1.0001, 1.0001, 20003)])
    expected = function(x.double())
    actual = torch.compile(function, backend="ort_train", fullgraph=True)(x).double()
    kept = expected.isfinite()
    assert torch.equal(actual.isfinite(), kept)
    error = ((actual - expected) / expected.abs().clamp(min=1e-30))[kept].abs().max().item()
    assert error < 8 * torch.finfo(torch.float32).eps
