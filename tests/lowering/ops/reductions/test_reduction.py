"""Sums, means, extrema, variances, norms, running sums."""

import math

import pytest
import torch

from ort_dynamo.testing import assert_like_eager

DIMS = [None, 0, -1, (0, 2), (1,), (0, 1, 2), ()]


def r(*sizes):
    return torch.randn(*sizes, requires_grad=True)


def named(function):
    return function.__name__


@pytest.mark.parametrize("function", [torch.sum, torch.mean, torch.amax, torch.amin, torch.var, torch.std], ids=named)
@pytest.mark.parametrize("dim", DIMS, ids=str)
def test_value_and_gradient_equal_eager(function, dim):
    if dim is None and function in (torch.amax, torch.amin):
        pytest.skip("needs dimensions")
    keep = [False, True] if dim is not None else [False]

    def reduce(x):
        return [function(x, dim=dim, keepdim=k) if dim is not None else function(x) for k in keep]

    assert_like_eager(reduce, r(3, 4, 5))
    assert_like_eager(reduce, r(3, 4, 5), dynamic=True)


@pytest.mark.parametrize("function", [torch.sum, torch.mean, torch.amax, torch.amin, torch.prod], ids=named)
def test_reductions_of_a_number_equal_eager(function):
    assert_like_eager(
        lambda x: (function(x), function(x, dim=0), function(x, dim=-1, keepdim=True)),
        torch.tensor(2.0, requires_grad=True),
    )


@pytest.mark.parametrize("function", [torch.sum, torch.prod], ids=named)
def test_integer_sums_equal_eager(function):
    numbers = torch.tensor([[1, 2, 3], [4, 5, 100]])
    assert_like_eager(
        lambda x, b: [
            *(function(x.to(d), 1) for d in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)),
            function(b),
            function(b, 0),
            function(x, 1, dtype=torch.float32),
            function(x, 1, dtype=torch.int32),
            function(x),
        ],
        numbers,
        numbers > 2,
        gradients=False,
    )


def test_half_width_reductions_equal_eager():
    def function(x):
        return (
            x.sum(),
            x.mean(),
            x.sum(1),
            x.mean(0),
            x.amax(1),
            x.amin(0),
            x.max(),
            x.sum(dtype=torch.float32),
            x.var(1),
            x.std(0),
            x.norm(),
            x.sum((0, 1)),
            x.mean(dtype=torch.float64),
            x.cumsum(1),
        )

    for dtype in (torch.float16, torch.bfloat16):
        assert_like_eager(function, (torch.rand(30, 40) + 1).to(dtype).requires_grad_())


@pytest.mark.filterwarnings("ignore:.*degrees of freedom:UserWarning")
@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)], ids=str)
def test_empty_reductions_equal_eager(shape):
    def function(x):
        results = [
            x.sum(),
            x.mean(),
            x.prod(),
            x.sum(0),
            x.mean(0),
            x.sum(-1, keepdim=True),
            x.mean(-1),
            (x > 0).any(),
            (x > 0).all(),
            x.bool().any(0),
            x.bool().all(-1),
            x.cumsum(0),
            x.norm(),
            x.var(),
        ]
        return results + ([x.amax(0), x.amax(0, True)] if x.shape[0] else [])

    assert_like_eager(function, torch.randn(*shape), gradients=False)


@pytest.mark.parametrize("function", [torch.max, torch.min, torch.aminmax], ids=named)
def test_extrema_of_all_equal_eager(function):
    assert_like_eager(function, r(3, 4))
    assert_like_eager(
        lambda x: [
            v for d in (torch.int64, torch.int32, torch.uint8, torch.int8, torch.float16) for v in [function(x.to(d))]
        ],
        torch.arange(6),
        gradients=False,
    )


@pytest.mark.parametrize("function", [torch.max, torch.min], ids=named)
@pytest.mark.parametrize("dim", [0, -1])
def test_extrema_with_indices_equal_eager(function, dim):
    assert_like_eager(lambda x: (*function(x, dim), *function(x, dim, True)), r(4, 5))
    assert_like_eager(lambda x: function(x, dim)[0], r(4, 5), dynamic=True)
    ties = torch.tensor([[3, 1, 3, 1], [2, 2, 2, 2], [0, 5, 5, 0]])
    floats = torch.where(ties == 1, math.nan, ties.float())
    infinite = torch.tensor(
        [[math.inf, math.nan, 1, math.inf], [-math.inf, 2, -math.inf, 3], [math.nan, math.nan, 0, 1]]
    )
    assert_like_eager(
        lambda *t: [v for x in t for v in function(x, dim)],
        ties,
        ties.int(),
        ties > 1,
        floats,
        infinite,
        floats.half(),
        gradients=False,
    )


def test_extrema_of_ties_and_nan_equal_eager():
    x = torch.tensor([[3.0, 1.0, 3.0], [2.0, 2.0, 2.0]], requires_grad=True)
    assert_like_eager(lambda x: (x.amax(1), x.amin(0), x.max(), x.min(), x.max(1).values), x)
    nan = torch.tensor([[1.0, math.nan, 2.0], [-math.inf, math.inf, 0.0]])
    assert_like_eager(
        lambda x: (x.amax(1), x.amin(0), x.max(), x.sum(1), x.mean(0), x.prod(1), x.norm(dim=1)), nan, gradients=False
    )


def test_extrema_of_a_number_equal_eager():
    assert_like_eager(lambda x: (*x.max(0), *x.min(-1), x.max()), torch.tensor(2.0), gradients=False)


@pytest.mark.parametrize("function", [torch.any, torch.all], ids=named)
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.int64, torch.uint8], ids=str)
def test_truth_equals_eager(function, dtype):
    x = (
        torch.tensor([[0.0, 1.0, 0.5], [2.0, 3.0, -1.0], [0.0, 0.0, 0.0]])
        .to(torch.int8 if dtype == torch.uint8 else dtype)
        .to(dtype)
    )
    assert_like_eager(
        lambda x: (
            function(x),
            function(x, 0),
            function(x, -1, True),
            function(x, dim=(0, 1)),
            function(x, dim=()),
            function(x[0, 0]),
            function(x[0, 0], 0),
        ),
        x,
        gradients=False,
    )
    assert_like_eager(lambda x: (function(x), function(x, 1)), x, gradients=False, dynamic=True)


@pytest.mark.parametrize("correction", [0, 1, 2, 0.5])
@pytest.mark.parametrize("dim", [None, 1, (0, 2)], ids=str)
def test_moments_equal_eager(correction, dim):
    def function(x):
        settings = {"dim": dim, "correction": correction, "keepdim": True}
        return (
            torch.var(x, **settings),
            torch.std(x, **settings),
            *torch.var_mean(x, **settings),
            *torch.std_mean(x, **settings),
        )

    assert_like_eager(function, r(3, 4, 5))
    assert_like_eager(function, r(3, 4, 5).detach(), gradients=False, dynamic=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [3e-24, 1e-20, 1.0, 1e19, 4e22, 2e37])
def test_moments_of_numbers_whose_squares_float32_does_not_hold_equal_eager(size, dtype):
    def function(x):
        return x.std(), x.std(1, keepdim=True), x.var(0), *torch.var_mean(x, 0), *torch.std_mean(x)

    x = (torch.linspace(0.5, 2.5, 12).view(4, 3).sin() * size).to(dtype)
    assert_like_eager(function, x, gradients=False)
    assert_like_eager(function, x, gradients=False, dynamic=True)
    assert_like_eager(lambda x: x[:2].std(0) / size, x.requires_grad_())


@pytest.mark.filterwarnings("ignore:.*degrees of freedom:UserWarning")
def test_moments_of_equal_and_of_infinite_numbers_equal_eager():
    def function(x):
        return x.std(1), x.var(1), x.std(), torch.var_mean(x, 0)

    rows = torch.tensor([[2.0, 2.0, 2.0], [math.inf, 0.0, 1.0], [math.nan, 0.0, 1.0], [1.0, 2.0, 4.0]])
    assert_like_eager(function, rows, gradients=False)
    assert_like_eager(lambda x: (x.std(1), x.std(), torch.var_mean(x, 1)), rows[:0], gradients=False)
    assert_like_eager(lambda x: torch.std_mean(x, correction=-1), rows[:0], gradients=False)
    assert_like_eager(lambda x: torch.var(x, 1, correction=-2), rows[:, :0], gradients=False)


@pytest.mark.filterwarnings("ignore:.*degrees of freedom:UserWarning")
def test_variance_of_too_few_numbers_equals_eager():
    assert_like_eager(
        lambda x: (x.var(0), x.var(0, correction=3), x.std(0), x.var(0, correction=0)),
        torch.randn(1, 3),
        gradients=False,
    )
    assert_like_eager(lambda x: (x.var(), x.var(correction=0)), torch.tensor(2.0), gradients=False)


@pytest.mark.parametrize("order", [2, 1, 0, 3, 0.5, -1, math.inf, -math.inf])
def test_vector_norms_equal_eager(order):
    def function(x):
        norm = torch.linalg.vector_norm
        return (
            norm(x, order),
            norm(x, order, dim=1),
            norm(x, order, dim=(0, -1), keepdim=True),
            norm(x, order, dtype=torch.float64),
        )

    if order == 0:
        assert_like_eager(function, torch.tensor([[0.0, 1.0, -2.0]]), gradients=False)
    else:
        assert_like_eager(function, r(3, 4))
        assert_like_eager(lambda x: torch.linalg.vector_norm(x, order, dim=1), r(3, 4), dynamic=True)


def test_other_norms_equal_eager():
    x = r(3, 4)
    assert_like_eager(
        lambda x: (x.norm(), x.norm(2, 1), x.norm(1, (0, 1), True), torch.linalg.norm(x), torch.linalg.matrix_norm(x)),
        x,
    )
    assert_like_eager(lambda x: torch.nn.functional.normalize(x, dim=1), x)
    assert_like_eager(lambda x: torch.nn.functional.cosine_similarity(x, x.flip(0)), x)
    assert_like_eager(lambda x: torch.linalg.vector_norm(x, dim=1), torch.zeros(2, 3, requires_grad=True))
    assert_like_eager(lambda x: torch.linalg.vector_norm(x), torch.tensor(-2.0, requires_grad=True))


def test_products_equal_eager():
    assert_like_eager(
        lambda x: (x.prod(), x.prod(1), x.prod(0, keepdim=True)), (torch.rand(3, 4) + 0.5).requires_grad_()
    )


def test_products_of_float64_equal_eager():
    x = (torch.rand(3, 4, dtype=torch.float64) + 0.5).requires_grad_()
    assert_like_eager(lambda x: (x.prod(), x.prod(1), x.prod(0, keepdim=True)), x)


def test_counting_equals_eager():
    x = torch.tensor([[0, 1, 2], [0, 0, 3]])
    assert_like_eager(
        lambda x: (x.count_nonzero(), x.count_nonzero(1), (x > 0).sum(), (x > 1).float().mean(), torch.nansum(x / 2)),
        x,
        gradients=False,
    )


def test_long_sums_are_accurate():
    # One after another, a million float32 numbers lose three digits; so they do in eager's norms.
    x, y, z = torch.full((1_000_000,), 0.1), torch.full((15000, 4), 0.1), torch.rand(100, 100, 100)

    def function(x, y, z):
        sums = x.sum(), y.sum(0), y.sum(), z.sum((0, 1)), z.sum((-1, 0), True), torch.logsumexp(x, 0)
        means = x.mean(), y.mean(0, True), z.mean((0, 2)), z.var()
        return *sums, *means, x.norm(), z.norm(1), torch.linalg.vector_norm(z, 3, (0, 1))

    expected = function(x.double(), y.double(), z.double())
    for actual, wanted in zip(torch.compile(function, backend="ort_train")(x, y, z), expected, strict=True):
        torch.testing.assert_close(actual, wanted.float(), rtol=1e-5, atol=0)


def test_long_sums_of_symbolic_sizes_equal_eager():
    def function(x, y):
        return y.sum(0), y.view(-1).sum(), y.mean(), torch.cat([x, x], 1).view(-1, 4).sum(0)

    assert_like_eager(function, torch.rand(10, 64 * 4), torch.rand(70, 50), gradients=False, dynamic=True)


def test_sums_of_prime_sizes_equal_eager():
    assert_like_eager(lambda x, y: (x.sum(), y.sum(), y.sum(0)), r(7919), r(1087, 3))


def test_sums_and_products_of_large_integers_are_exact():
    # onnxruntime 1.31.1 computes both in float64.
    x = torch.tensor([[2**62, -(2**62), 2**53 + 1, -3], [2**62, 2**62, 2**62 + 5, 1], [-(2**63), 2**63 - 1, -7, 2**40]])

    def function(x):
        sums = x.sum(), x.sum(0), x.sum(1, True), x.sum((0, 1)), x.int().sum(), x.sum(dtype=torch.int32)
        return *sums, x.prod(), x.prod(0), x.prod(1, True), x[0].prod(), x[:0].prod(0), x[:0].sum(0)

    assert_like_eager(function, x, gradients=False)
    assert_like_eager(lambda x: (x.sum(), x.sum(1), x.prod(0)), x, gradients=False, dynamic=True)


def test_the_norm_of_a_single_number_is_its_absolute_value():
    # The number to a power would be infinite, or zero.
    def function(x, y):
        of_one = x.norm(p=-41.0, dim=1), x.norm(p=-41.0, dim=1, keepdim=True), torch.linalg.vector_norm(y, 3.0)
        return *of_one, x.norm(p=3.0, dim=(1, 2)), x.norm(p=0, dim=1)

    assert_like_eager(function, torch.randn(4, 1, 1) * 1e-4, torch.tensor(-1e-30), gradients=False)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dim", [0, 1, -1, (0, 1), (0, 2), (1, 3), (0, 1, 2, 3)], ids=str)
def test_integer_sums_over_any_dimensions_wrap_around_as_eagers(dim, dynamic):
    x = torch.randint(-(2**63), 2**63 - 1, (4, 5, 6, 3))
    assert_like_eager(lambda x: (x.sum(dim), x.sum(dim, keepdim=True)), x, gradients=False, dynamic=dynamic)
    assert_like_eager(lambda x: x.sum(dim, dtype=torch.int32), x.int(), gradients=False, dynamic=dynamic)
    assert_like_eager(lambda x: (x.sum(dim), x.byte().sum(dim)), x > 0, gradients=False, dynamic=dynamic)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("shape", [(0, 3), (3, 0)], ids=str)
def test_integer_sums_of_nothing_equal_eager(shape, dynamic):
    x = torch.zeros(shape, dtype=torch.int64)
    assert_like_eager(lambda x: (x.sum(), x.sum(0), x.sum(1, keepdim=True)), x, gradients=False, dynamic=dynamic)


def test_means_and_variances_over_many_rows_of_a_symbolic_number_are_accurate():
    x = torch.rand(300_000, 3) + 5

    def moments(x):
        return x.mean(0), x.var(0), x.std(0, keepdim=True), torch.linalg.vector_norm(x, dim=0)

    torch._dynamo.reset()
    found = torch.compile(moments, backend="ort_train", dynamic=True, fullgraph=True)(x)
    for mine, exact in zip(found, moments(x.double()), strict=True):
        assert ((mine - exact).abs() / exact).max().item() < 2e-6
