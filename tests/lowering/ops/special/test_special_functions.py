"""Error functions, gamma functions and Bessel functions."""

import math

import pytest
import torch

from ort_dynamo.testing import Tolerance, assert_close, assert_like_eager

FUNCTIONS = {
    "erf": torch.erf,
    "erfc": torch.erfc,
    "erfcx": torch.special.erfcx,
    "erfinv": torch.erfinv,
    "ndtr": torch.special.ndtr,
    "ndtri": torch.special.ndtri,
    "log_ndtr": torch.special.log_ndtr,
    "lgamma": torch.lgamma,
    "digamma": torch.digamma,
    "trigamma": lambda x: torch.polygamma(1, x),
    "polygamma 2": lambda x: torch.polygamma(2, x),
    "polygamma 3": lambda x: torch.polygamma(3, x),
    "mvlgamma": lambda x: torch.mvlgamma(x.abs() + 2.1, 4),
    "i0": torch.i0,
    "i0e": torch.special.i0e,
    "i1": torch.special.i1,
    "i1e": torch.special.i1e,
}
every_function = pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS.keys())
EDGES = [0.0, -0.0, 1.0, -1.0, 2.0, -2.0, -0.5, 1e-7, -1e-7, 1e-30, 0.5, 7.5, -7.25, 8.0, 30.0, -30.0, math.nan]


@every_function
def test_value_and_gradient_equal_eager(function):
    x = torch.tensor([[0.01, 0.2, 0.45], [0.55, 0.8, 0.97]])
    assert_like_eager(
        lambda a, b, c: (function(a), function(b), function(c)),
        x.clone().requires_grad_(),
        x[0, 1].clone().requires_grad_(),
        torch.empty(0, 4, requires_grad=True),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@every_function
def test_the_whole_line_equals_eager(function, dtype):
    x = torch.cat([torch.tensor(EDGES, dtype=dtype), torch.linspace(-9.9, 11.3, 107, dtype=dtype)])
    if function is FUNCTIONS["trigamma"]:
        x = x[(x > 0) | (x != x.round())]  # torch does not have infinity there: see the next test
    expected = function(x)
    compiled = torch.compile(function, backend="ort_train", fullgraph=True)
    actual = compiled(x)
    for sign in (-1, 1):
        assert_close(actual == sign * math.inf, expected == sign * math.inf, "infinities")
    finite = expected.isfinite()
    assert_close(actual.isfinite(), finite, "finite values")
    # Relative to each value, but for those below one, which may be near a root.
    scale = expected[finite].abs() + 1
    # torch's own trigamma ends its series early: in float64 its error is 5e-10.
    limit = Tolerance(0, 1e-5) if dtype == torch.float32 else Tolerance(0, 1e-9)
    assert_close(actual[finite] / scale, expected[finite] / scale, "values", limit)


def test_derivatives_of_the_gamma_function_at_their_poles_equal_eager():
    poles = torch.tensor([0.0, -0.0, -3.0, -math.inf])
    assert_like_eager(lambda x: [torch.polygamma(n, x) for n in (0, 2, 3)], poles, gradients=False)
    assert_like_eager(lambda x: torch.polygamma(1, x), poles[:2], gradients=False)


def test_infinities_equal_eager():
    x = torch.tensor([math.inf, -math.inf])
    functions = [torch.erf, torch.erfc, torch.erfinv, torch.special.ndtri, torch.lgamma, torch.digamma]
    assert_like_eager(lambda x: [function(x) for function in functions], x, gradients=False)
    assert_like_eager(lambda x: [function(x) for function in functions], x.double(), gradients=False)


@pytest.mark.parametrize("function", [torch.erfc, torch.special.ndtri, torch.special.i0e, torch.special.erfcx])
def test_tails_keep_their_digits(function):
    x = torch.linspace(1, 9, 17) if function is not torch.special.ndtri else torch.logspace(-30, -1, 30)
    compiled = torch.compile(function, backend="ort_train", fullgraph=True)
    assert_close(compiled(x) / function(x), torch.ones_like(x), "ratio")
    assert_close(compiled(x.double()) / function(x.double()), torch.ones_like(x.double()), "ratio")


def test_the_logarithm_of_gamma_keeps_its_digits_near_its_roots():
    x = torch.cat([1 + torch.logspace(-6, -1, 9), 1 - torch.logspace(-6, -1, 9), 2 + torch.logspace(-6, -1, 9)])
    compiled = torch.compile(torch.lgamma, backend="ort_train", fullgraph=True)
    assert_close(compiled(x) / torch.lgamma(x), torch.ones_like(x), "ratio")


def test_the_inverse_of_erf_keeps_its_digits_near_one():
    steps = 2.0 ** -torch.arange(1, 54, dtype=torch.float64)
    x = torch.cat([1 - steps, steps - 1, torch.linspace(-0.95, 0.95, 39, dtype=torch.float64)]).requires_grad_()
    compiled = torch.compile(torch.erfinv, backend="ort_train", fullgraph=True)
    found, expected = compiled(x), torch.erfinv(x)
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-16)
    (gradient,), (expected_gradient,) = (torch.autograd.grad(y.sum(), x) for y in (found, expected))
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=0)


def test_half_width_values_equal_eager():
    x = torch.rand(4, 6) * 0.8 + 0.1
    functions = [torch.erfinv, torch.erfc, torch.lgamma, torch.digamma, torch.i0]
    assert_like_eager(lambda *x: [f(y) for f in functions for y in x], x.half(), x.bfloat16(), gradients=False)


def test_integers_equal_eager():
    numbers = [torch.tensor([1, 2, 7, 30], dtype=d) for d in (torch.uint8, torch.int32, torch.int64)]
    functions = [FUNCTIONS[name] for name in ("erf", "lgamma", "digamma", "trigamma", "i0")]
    assert_like_eager(lambda *n: [function(m) for function in functions for m in n], *numbers, gradients=False)


@pytest.mark.parametrize("name", ["erfinv", "lgamma", "polygamma 2", "i1"])
def test_symbolic_sizes_equal_eager(name):
    assert_like_eager(FUNCTIONS[name], torch.rand(3, 5, requires_grad=True), dynamic=True)


def test_a_derivative_of_high_order_stays_in_eager():
    assert_like_eager(lambda x: torch.polygamma(25, x) + 1, torch.rand(3) + 1, gradients=False, allow_eager=True)


BESSEL = ["bessel_j0", "bessel_j1", "bessel_y0", "bessel_y1", "modified_bessel_i0", "modified_bessel_i1",
          "modified_bessel_k0", "modified_bessel_k1", "scaled_modified_bessel_k0", "scaled_modified_bessel_k1",
          "spherical_bessel_j0"]  # fmt: skip


@pytest.mark.parametrize("name", BESSEL)
def test_bessel_functions_equal_eager(name):
    function = getattr(torch.special, name)
    x = torch.cat([torch.tensor([e for e in EDGES if abs(e) < 20 or math.isnan(e)]), torch.linspace(0.01, 25, 97)])
    scale = function(x).abs() + 1
    scale = torch.where(scale.isfinite(), scale, 1.0)
    assert_like_eager(lambda x: function(x) / scale, x, gradients=False)
    if name[:8] not in ("bessel_j", "bessel_y"):
        assert_like_eager(lambda x: function(x) / scale, x.double(), gradients=False)


def test_bessel_functions_that_torch_computes_roughly_stay_in_eager():
    x = torch.rand(3, dtype=torch.float64) + 4
    assert_like_eager(lambda x: torch.special.bessel_j0(x) + 1, x, gradients=False, allow_eager=True)
