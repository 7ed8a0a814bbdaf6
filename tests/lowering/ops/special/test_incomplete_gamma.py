"""Hurwitz's zeta function, the incomplete gamma functions and Airy's function."""

import math

import pytest
import torch

from ort_dynamo.testing import Tolerance, assert_close, assert_like_eager

inf, nan = math.inf, math.nan
FLOATS = [torch.float32, torch.float64]
INCOMPLETE = [torch.igamma, torch.igammac]


def compiled(function):
    return torch.compile(function, backend="ort_train", fullgraph=True, options={"fallback": "error"})


# -- zeta --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_zeta_function_equals_eager_to_the_last_digits(dtype):
    s = torch.cat([torch.rand(300) * 15 + 1.001, torch.randint(2, 9, (300,))]).to(dtype)
    q = torch.cat([torch.rand(300) * 50 + 0.2, torch.randn(300) * 20]).to(dtype)
    # Each value by itself: they range over twenty orders of magnitude. Eager, too, computes in float64.
    ratio = compiled(torch.special.zeta)(s, q) / torch.special.zeta(s, q)
    assert_close(ratio, torch.ones_like(ratio), "ratio", Tolerance(0, 2e-7 if dtype == torch.float32 else 1e-13))


def test_edges_of_the_zeta_function_equal_eager():
    s = torch.tensor([1.0, 0.5, 2, 2, 2.5, 2, inf, inf, inf, nan, 2, 3, 2, 0, 300, 1e4])
    q = torch.tensor([1.0, 1, 0, -1, -1.5, -1.5, 2, 1, 0.5, 1, nan, inf, -inf, -inf, 2.5, 1e4])
    assert_like_eager(torch.special.zeta, s, q, gradients=False)
    assert_like_eager(lambda s, q: torch.special.zeta(s, q), torch.tensor([2, 3]), torch.tensor(4), gradients=False)
    assert_like_eager(torch.special.zeta, torch.rand(0, 3), torch.rand(3), gradients=False)


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_gradient_of_the_zeta_function_equals_eager(dynamic):
    s, q = torch.rand(3, 4) * 5 + 1.5, torch.rand(4) * 6 + 0.3
    assert_like_eager(torch.special.zeta, s, q.requires_grad_(), dynamic=dynamic)


# -- incomplete gamma --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", INCOMPLETE)
@pytest.mark.parametrize("scale", [0.5, 5, 100, 3e3, 2e4, 1e7])
def test_incomplete_gamma_functions_are_exact(function, scale):
    a = (torch.rand(400) * scale + 1e-4).double()
    x = (a + torch.randn(400).clamp(-2, 2) * a.sqrt() * 2).abs() + 1e-4
    expected = function(a, x)
    # Eager's float64 is good to 4e-10 (above a = 20, less from 4.5 √a beside a on), its float32 to 2e-5.
    assert_close(compiled(function)(a, x), expected, "float64", Tolerance(0, 1e-9))
    assert_close(compiled(function)(a.float(), x.float()), function(a.float().double(), x.float().double()).float(),
                 "float32", Tolerance(0, 1e-7))  # fmt: skip


@pytest.mark.parametrize("dtype", [*FLOATS, torch.bfloat16], ids=str)
@pytest.mark.parametrize("function", INCOMPLETE)
def test_edges_of_the_incomplete_gamma_functions_equal_eager(function, dtype):
    a = torch.tensor([0.0, 0, 1, inf, inf, 1, -1, 1, nan, 1, inf, 0, 3, 3, 1e5, 1e5], dtype=dtype)
    x = torch.tensor([0.0, 1, 0, 1, inf, inf, 1, -1, 1, nan, 0, inf, 1e-9, 1e9, 1e-3, 1e9], dtype=dtype)
    assert_like_eager(function, a, x, gradients=False)
    assert_like_eager(function, a[:, None][:0], x, gradients=False)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("function", INCOMPLETE)
def test_gradients_of_the_incomplete_gamma_functions_equal_eager(function, dynamic):
    a, x = torch.rand(3, 4) * 5 + 0.2, torch.rand(4) * 6 + 0.1
    assert_like_eager(function, a, x.requires_grad_(), dynamic=dynamic)
    assert_like_eager(function, torch.tensor(2.0), torch.tensor(1.5, requires_grad=True), dynamic=dynamic)


# -- Airy --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [False, True])
def test_airys_function_equals_eager(dynamic):
    edges = torch.tensor([inf, -inf, nan, 0.0, -0.0, 104, 103, 2.09, -2.09, 2.25, -2.25, 1e-30])
    x = torch.cat([edges, torch.linspace(-30, 30, 500)])
    assert_like_eager(torch.special.airy_ai, x, gradients=False, dynamic=dynamic)
    assert_like_eager(torch.special.airy_ai, torch.arange(4), gradients=False)
    ratio = compiled(torch.special.airy_ai)(torch.linspace(0, 15, 50)) / torch.special.airy_ai(
        torch.linspace(0, 15, 50)
    )
    assert_close(ratio, torch.ones_like(ratio), "ratio")


def test_airys_function_that_torch_computes_roughly_stays_in_eager():
    x = torch.rand(3, dtype=torch.float64) - 4
    assert_like_eager(lambda x: torch.special.airy_ai(x) + 1, x, gradients=False, allow_eager=True)
