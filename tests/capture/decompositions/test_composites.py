"""Operators that are traced as their formulas."""

import itertools

import pytest
import torch
from torch import nn

from ort_dynamo.testing import assert_like_eager


@pytest.mark.parametrize("dim", [0, 2])
def test_weight_normalization_and_its_gradient_equal_eager(dim):
    layer = nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 6, 3), dim=dim)
    assert_like_eager(layer, torch.randn(2, 4, 8, requires_grad=True))


_DRAWS = {
    "bernoulli": lambda p, x: torch.bernoulli(p) * x,
    "normal of tensors": lambda p, x: torch.normal(x, p),
    "normal around a tensor": lambda p, x: torch.normal(x, 0.3),
    "normal with deviations": lambda p, x: torch.normal(0.5, p) * x,
    "multinomial": lambda p, x: torch.multinomial(p, 1),
    "multinomial, several": lambda p, x: torch.multinomial(p, 4),
    "multinomial of one row": lambda p, x: torch.multinomial(p[0], 5, replacement=False),
}


_FLOATS = ("float16", "bfloat16", "float32", "float64")


@pytest.mark.parametrize("dtypes", [*itertools.permutations(_FLOATS, 2)], ids="-".join)
def test_normal_has_the_dtype_of_its_mean(dtypes):
    mean, std = (torch.rand(2, 8).to(getattr(torch, dtype)) for dtype in dtypes)

    def function(mean, std):
        draws = [(mean, std), (mean[0], std), (mean, std[0]), (mean[0, 0], std)]
        return [torch.normal(*given) for given in draws]

    results = []
    for run in (function, torch.compile(function, backend="ort_train")):
        torch.manual_seed(0)
        results.append(run(mean, std))
    torch.testing.assert_close(*reversed(results), rtol=1e-2, atol=1e-2)  # the dtypes, too


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("draw", _DRAWS.values(), ids=_DRAWS)
def test_random_numbers_from_data_equal_eager(draw, transposed, dtype, dynamic):
    p = torch.rand(7, 7, dtype=dtype).clamp(0.05, 0.95)
    x = torch.randn(7, 7, dtype=dtype, requires_grad=True)

    def function(p, x):
        return draw(p.t() if transposed else p, x), x * torch.rand(7)  # the generator moves as far as in eager

    assert_like_eager(function, p, x, dynamic=dynamic)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_bernoulli_in_half_precision_equals_eager(dtype):
    assert_like_eager(lambda p: torch.bernoulli(p), torch.rand(33, 65).to(dtype), gradients=False)


@pytest.mark.parametrize(
    ("draw", "data"),
    [
        (torch.bernoulli, [0.5, 1.5]),
        (torch.bernoulli, [0.5, float("nan")]),
        (lambda s: torch.normal(0.0, s), [1.0, -1.0]),
        (lambda p: torch.multinomial(p, 1), [1.0, -1.0]),
        (lambda p: torch.multinomial(p, 1), [1.0, float("nan")]),
        (lambda p: torch.multinomial(p, 1), [0.0, 0.0]),
    ],
)
def test_invalid_probabilities_raise_as_in_eager(draw, data):
    with pytest.raises(RuntimeError) as expected:
        draw(torch.tensor(data))
    with pytest.raises(RuntimeError) as found:
        torch.compile(draw, backend="ort_train")(torch.tensor(data))
    said, *_ = str(found.value).splitlines()  # our message adds the operator's line, which eager's lacks
    assert said.split(", but got")[0] in str(expected.value)


@pytest.mark.parametrize(("samples", "why"), [(3, "n_sample > prob_dist"), (0, "n_sample <= 0")])
def test_multinomial_of_more_samples_than_there_are_or_of_none_says_so(samples, why):
    with pytest.raises(Exception, match=f"cannot sample {why}"):
        torch.compile(lambda p: torch.multinomial(p, samples), backend="ort_train")(torch.ones(2))


def test_the_gradient_of_a_randomized_relu_stays_whole():
    x = torch.randn(4, 6, requires_grad=True)
    assert_like_eager(lambda x: torch.nn.functional.rrelu(x * 2, training=False), x)
    assert_like_eager(lambda x: torch.nn.functional.rrelu(x * 2, training=True), x)
    assert torch._dynamo.utils.counters["ort_train_by_design"] == {"aten.rrelu_with_noise_functional.default": 1}


def test_prims_are_the_aten_functions_that_torch_runs_for_them():
    prims = torch.ops.prims

    def function(x):
        mantissa, exponent = prims.frexp(x)
        parts = [prims.rev(x, [0]), prims.cbrt(x), prims.signbit(x), prims.clone(x), prims.bessel_j0(x)]
        reductions = [prims.amax(x, [0]), prims.prod(x, [1]), prims.var(x, [0], 1.0), prims.sum(x, [1])]
        made = prims.iota(7, start=2, step=3, dtype=torch.int64, device="cpu", requires_grad=False)
        return mantissa, exponent, *parts, *reductions, made

    assert_like_eager(function, torch.randn(4, 6), gradients=False)


def test_random_prims_equal_eager():
    def function(x):
        a = torch.ops.prims.uniform([3, 4], low=0.0, high=2.0, stride=[4, 1], dtype=torch.float32, device="cpu")
        b = torch.ops.prims.normal(
            [3, 4], mean=0.0, std=2.0, dtype=torch.float32, device=torch.device("cpu"), requires_grad=False
        )
        return a * x, b + x, torch.rand(3)

    assert_like_eager(function, torch.randn(4), gradients=False)


@pytest.mark.parametrize("upper", [False, True])
def test_systems_given_by_a_factor_are_triangular_systems(upper):
    factor = torch.linalg.cholesky(torch.eye(5) + torch.full((2, 5, 5), 0.1)).requires_grad_()
    right = torch.randn(2, 5, 3, requires_grad=True)
    assert_like_eager(lambda b, u: torch.cholesky_solve(b, u.mT if upper else u, upper), right, factor)
    assert_like_eager(lambda u: torch.cholesky_inverse(u.mT if upper else u, upper), factor)


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.filterwarnings("ignore:torch.triangular_solve is deprecated")
def test_the_deprecated_triangular_system_equals_eager(transpose):
    def solve(b, system):
        return torch.triangular_solve(b, system, upper=False, transpose=transpose)

    assert_like_eager(solve, torch.randn(3, 5, 2), torch.eye(5) + 0.1 * torch.ones(5, 5), gradients=False)
