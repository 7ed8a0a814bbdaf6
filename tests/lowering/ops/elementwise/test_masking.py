"""Choosing by a mask."""

import math

import pytest
import torch

from ort_dynamo.testing import assert_like_eager, eager_reasons

t = torch.tensor


def r(*sizes, dtype=torch.float32):
    return torch.randn(*sizes, dtype=dtype).requires_grad_()


def mask(*sizes):
    return torch.rand(*sizes) > 0.5


@pytest.mark.parametrize("dynamic", [False, True])
def test_where_and_gradients_equal_eager(dynamic):
    def function(m, x, y):
        return torch.where(m, x, y), torch.where(m, x, 2.0), torch.where(m[:, :, :1], -1, y), torch.where(m, 1.0, 0.0)

    assert_like_eager(function, mask(5, 1, 6), r(5, 4, 6), r(6), dynamic=dynamic)


@pytest.mark.parametrize("other", [torch.float64, torch.float16, torch.int64, torch.bool], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16, torch.uint8, torch.bool], ids=str)
def test_where_of_mixed_dtypes_equals_eager(dtype, other):
    def function(m, x, y):
        return torch.where(m, x, y), torch.where(m, y, x[0, 0]), torch.where(m, x, 1)

    assert_like_eager(function, mask(3, 4), torch.ones(3, 4).to(dtype), torch.zeros(4).to(other), gradients=False)


@pytest.mark.parametrize("dynamic", [False, True])
def test_masked_fill_equals_eager(dynamic):
    def function(x, m, v):
        return x.masked_fill(m, -math.inf), x.masked_fill(m, v), x.masked_fill(x > 0, 0), x.masked_fill(m, math.nan)

    assert_like_eager(function, r(5, 4, 6), mask(5, 1, 6), t(2.0, requires_grad=True), dynamic=dynamic)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool], ids=str
)
def test_masked_fill_of_every_dtype_equals_eager(dtype):
    assert_like_eager(
        lambda x, m: (x.masked_fill(m, 1), x.masked_fill(m, t(0))),
        torch.ones(3, 4).to(dtype),
        mask(3, 4),
        gradients=False,
    )


@pytest.mark.parametrize("dynamic", [False, True])
def test_masked_scatter_and_gradients_equal_eager(dynamic):
    assert_like_eager(lambda x, m, s: x.masked_scatter(m, s), r(5, 4, 6), mask(5, 4, 6), r(10, 15), dynamic=dynamic)
    assert_like_eager(lambda x, m, s: x.masked_scatter(m, s), r(5, 4, 6), mask(4, 1), r(5, 4, 6), dynamic=dynamic)


def test_masked_scatter_of_nothing_equals_eager():
    none = torch.zeros(3, dtype=torch.bool)
    assert_like_eager(
        lambda x, m, s: (x.masked_scatter(m, s), x.masked_scatter(m, s[:0])),
        torch.randn(2, 3),
        none,
        torch.randn(4),
        gradients=False,
    )


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("diagonal", [0, 1, -2, 9, -9])
def test_triangles_and_gradients_equal_eager(diagonal, dynamic):
    assert_like_eager(lambda x: (x.tril(diagonal), x.triu(diagonal)), r(3, 4, 6), dynamic=dynamic)


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool],
    ids=str,
)
def test_triangles_of_every_dtype_equal_eager(dtype):
    assert_like_eager(lambda x: (x.tril(), x.triu(1)), torch.ones(4, 4).to(dtype), gradients=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.bool], ids=str)
def test_places_of_a_given_number_equal_eager(dtype):
    def function(x):
        return (
            torch.nonzero_static(x, size=4),
            torch.nonzero_static(x, size=30, fill_value=7),
            torch.nonzero_static(x[0], size=0),
            torch.nonzero_static(x[:0], size=2),
            torch.nonzero_static(x[0, 0], size=2),
        )

    assert_like_eager(function, t([[0, 1, 0, 2], [3, 0, 0, 1], [0, 0, 0, 0]]).to(dtype), gradients=False)
    if dtype.is_floating_point:
        assert_like_eager(
            lambda x: torch.nonzero_static(x, size=3), t([math.nan, -0.0, math.inf], dtype=dtype), gradients=False
        )


@pytest.mark.parametrize("dynamic", [False, True])
def test_repetitions_of_a_given_total_equal_eager(dynamic):
    def function(x, repeats):
        return torch.repeat_interleave(x, repeats, dim=1, output_size=7), x.repeat_interleave(2, 0)

    assert_like_eager(function, r(3, 5), t([2, 0, 1, 4, 0]), dynamic=dynamic)
    assert_like_eager(function, r(3, 5), t([0, 0, 0, 0, 7], dtype=torch.int32), dynamic=dynamic)


@pytest.mark.parametrize("function", [torch.nonzero, lambda x: x[x > 0]])
def test_results_of_unknown_size_stay_in_eager(function):
    compiled = torch.compile(function, backend="ort_train")
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        x = t([1.0, 0, -1, 2])
        assert torch.equal(compiled(x), function(x))
    assert any("depends on the data" in reason for reason in eager_reasons())


def test_nonzero_of_a_given_size_equals_eager():
    def function(x):
        sizes = (0, 2, 30)
        return [torch.nonzero_static(x, size=n, fill_value=-7) for n in sizes], torch.nonzero_static(x[0, 0], size=3)

    assert_like_eager(function, torch.tensor([[0.0, 1, 2], [3, 0, -4]]), gradients=False)
    assert_like_eager(function, torch.rand(3, 4) > 0.5, gradients=False, dynamic=True)
