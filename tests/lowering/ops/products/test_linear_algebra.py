"""Determinants, triangular systems, and operators around factorisations that stay in eager."""

import pytest
import torch

from ort_dynamo.testing import assert_like_eager
from ort_dynamo.torch_internals.tracing.dynamo import counters


@pytest.mark.parametrize("shape", [(3, 3), (2, 4, 3, 3), (1, 1), (0, 0), (0, 2, 2)], ids=str)
def test_determinants_equal_eager(shape):
    assert_like_eager(lambda x: (torch.linalg.det(x), torch.det(x * 2)), torch.randn(shape), gradients=False)


def test_gradients_of_determinants_equal_eager():
    assert_like_eager(lambda x: torch.linalg.det(x) * 2, torch.randn(2, 3, 3).requires_grad_(), allow_eager=True)


def test_solutions_of_empty_systems_equal_eager():
    # onnxruntime-training 1.19.2 divides by zero in a product of empty matrices.
    a, b = torch.randn(2, 0, 0, requires_grad=True), torch.randn(2, 0, requires_grad=True)
    assert_like_eager(torch.linalg.solve, a, b, allow_eager=True)
    assert_like_eager(lambda x: torch.linalg.qr(x), torch.randn(1, 1, 0, 0, requires_grad=True), allow_eager=True)


def test_empty_tensors_of_other_strides_cross_into_a_session():
    assert_like_eager(
        lambda x: torch.linalg.matrix_power(x, -2), torch.randn(0, 2, 2, requires_grad=True), allow_eager=True
    )


def triangle(size, dtype=torch.float32):
    return (torch.randn(2, 3, size, size, dtype=dtype) / size**0.5 + 2 * torch.eye(size, dtype=dtype)).requires_grad_()


IN_SESSIONS = {"placement": "onnxruntime"}


@pytest.mark.parametrize("size", [1, 2, 5, 64])
@pytest.mark.parametrize("upper", [False, True], ids=["lower", "upper"])
@pytest.mark.parametrize("unitriangular", [False, True], ids=["any diagonal", "unit diagonal"])
def test_triangular_systems_equal_eager(size, upper, unitriangular):
    sides = torch.randn(2, 3, size, 4, requires_grad=True)
    options = {"upper": upper, "unitriangular": unitriangular}
    assert_like_eager(
        lambda a, b: torch.linalg.solve_triangular(a, b, **options), triangle(size), sides, options=IN_SESSIONS
    )


def test_triangular_systems_from_the_right_broadcast_and_in_float64_equal_eager():
    def solve(a, b):
        right = torch.linalg.solve_triangular(a, b.mT, upper=True, left=False)
        return right, torch.linalg.solve_triangular(a[:1, 0], b, upper=False)

    sides = torch.randn(2, 3, 13, 4, dtype=torch.float64, requires_grad=True)
    assert_like_eager(solve, triangle(13, torch.float64), sides, options=IN_SESSIONS)


@pytest.mark.parametrize("upper", [False, True], ids=["lower", "upper"])
def test_triangular_systems_of_symbolic_size_equal_eager(upper):
    assert_like_eager(
        lambda a, b: torch.linalg.solve_triangular(a, b, upper=upper),
        triangle(13),
        torch.randn(2, 3, 13, 4, requires_grad=True),
        dynamic=True,
        options=IN_SESSIONS,
    )


def test_triangular_solve_ignores_the_other_triangle():
    a = triangle(5).detach().masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), torch.nan)
    assert_like_eager(
        lambda a, b: torch.linalg.solve_triangular(a, b, upper=False),
        a,
        torch.randn(2, 3, 5, 2),
        gradients=False,
        options=IN_SESSIONS,
    )


@pytest.mark.parametrize("shapes", [((1024, 1024), (1024, 4)), ((512, 8, 8), (512, 8, 8)), ((2, 0, 0), (2, 0, 3))])
def test_triangular_systems_that_stay_in_eager_equal_eager(shapes):
    a, b = torch.eye(shapes[0][-1]).expand(shapes[0]).clone(), torch.randn(shapes[1])
    assert_like_eager(
        lambda a, b: torch.linalg.solve_triangular(a, b, upper=False) + 1,
        a,
        b,
        gradients=False,
        allow_eager=True,
        options=IN_SESSIONS,
    )


@pytest.mark.parametrize("shapes", [((0, 0), (0, 2)), ((3, 3), (3, 0)), ((0, 3, 3), (0, 3, 2))], ids=str)
@pytest.mark.parametrize("dynamic", [False, True])
def test_triangular_systems_of_nothing_equal_eager(shapes, dynamic):
    a, b = (torch.randn(shape, requires_grad=True) for shape in shapes)
    assert_like_eager(
        lambda a, b: torch.linalg.solve_triangular(a, b, upper=True), a, b, dynamic=dynamic, options=IN_SESSIONS
    )


def ill_conditioned() -> tuple[torch.Tensor, torch.Tensor]:
    """The factor of a Gaussian process's covariance, and right sides of solutions around 1, in float64."""
    places = torch.linspace(0, 1, 64, dtype=torch.float64)
    covariance = torch.exp(-((places[:, None] - places) ** 2) / 0.02) + 1e-4 * torch.eye(64, dtype=torch.float64)
    factor = torch.linalg.cholesky(covariance)
    return factor, factor @ torch.randn(64, 4, dtype=torch.float64)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_triangular_system_is_solved_by_substitution(dynamic):
    def solve(a, b):
        return torch.linalg.solve_triangular(a * 1, b, upper=False)

    given, results = ill_conditioned(), []
    compiled = torch.compile(solve, backend="ort_train", dynamic=dynamic)
    for run, dtype in ((solve, torch.float64), (compiled, torch.float32)):
        a, b = (value.detach().to(dtype).requires_grad_() for value in given)
        result = run(a, b)
        result.sum().backward()
        results.append([result.detach().double(), a.grad.double()])
    (expected, slope), (found, gradient) = results
    assert (found - expected).abs().max() < 2e-4  # that of the product with an inverse is 5e-3
    assert (gradient - slope).abs().max() < 1e-2  # 0.25
    assert counters["ort_train_chosen"]
    zero_pivot, infinite = torch.tensor([[0.0, 0.0], [1.0, 1.0]]), torch.tensor([[1.0], [torch.inf]])
    for a, b in ((zero_pivot, torch.ones(2, 1)), (torch.eye(2), infinite)):
        torch.testing.assert_close(torch.compile(solve, backend="ort_train")(a, b), solve(a, b), equal_nan=True)
