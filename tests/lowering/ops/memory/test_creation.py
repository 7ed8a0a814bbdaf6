"""Tensors from numbers."""

import pytest
import torch

from ort_dynamo.testing import assert_like_eager

DTYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_filled_tensors_equal_eager(dtype, dynamic):
    def function(x):
        n, m = x.shape
        like = x.to(dtype)
        return (
            torch.zeros(n, m + 1, dtype=dtype),
            torch.ones((m, n * 2), dtype=dtype),
            torch.full((n,), 1, dtype=dtype),
            torch.full((), 1, dtype=dtype),
            torch.full_like(like, 1),
            torch.zeros_like(like),
            torch.ones_like(like),
            like.new_zeros(m),
            like.new_ones(n, 2),
            like.new_full((n, 0), 1),
            like.new_full((n, m), 1),
            torch.zeros(0, 3, dtype=dtype),
        )

    assert_like_eager(function, torch.randn(3, 5), gradients=False, dynamic=dynamic)


def test_filled_tensors_of_any_number_equal_eager():
    def function(x):
        return (
            torch.full((2, 3), 0.1),
            torch.full((2,), -7),
            torch.full((2,), True),
            torch.full((2, 2), float("-inf")),
            torch.full_like(x, 0.1, dtype=torch.float64),
            torch.full_like(x, -3, dtype=torch.int32),
            torch.tensor(2.5) * x,
            torch.full((2,), x.shape[0]),
            torch.empty(2, 3).fill_(4.0),
            torch.empty_like(x).copy_(x),
            torch.scalar_tensor(3.5),
        )

    assert_like_eager(function, torch.randn(3, 5), gradients=False)
    assert_like_eager(function, torch.randn(3, 5), gradients=False, dynamic=True)


def test_filling_with_a_tensor_equals_eager():
    assert_like_eager(
        lambda x, v: torch.fill(x * 2, v) * x, torch.randn(3, requires_grad=True), torch.tensor(2.0, requires_grad=True)
    )


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_ranges_equal_eager(dynamic):
    def function(x):
        n = x.shape[0]
        return (
            torch.arange(n),
            torch.arange(2, n + 5),
            torch.arange(n, -n, -2),
            torch.arange(0, 1, 0.1),
            torch.arange(n, dtype=torch.float32),
            torch.arange(n, dtype=torch.int32),
            torch.arange(0.5, 4.2, 0.7, dtype=torch.float64),
            torch.arange(1, 10, 3, dtype=torch.float16),
            torch.arange(3, 3),
            torch.arange(10.0, 0.0, -1.5),
        )

    assert_like_eager(function, torch.randn(7), gradients=False, dynamic=dynamic)


def test_linspace_eye_and_triangles_equal_eager():
    def function(x):
        n = x.shape[0]
        return (
            torch.linspace(0, 1, 7),
            torch.linspace(-3, 2, 4, dtype=torch.float64),
            torch.eye(4),
            torch.eye(n, n + 2),
            torch.tril_indices(3, 4),
            torch.triu_indices(4, 3, 1),
            torch.tril_indices(2, 5, -1, dtype=torch.int32),
        )

    assert_like_eager(function, torch.randn(5), gradients=False)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.uint8])
def test_the_ends_of_a_linspace_of_integers_are_rounded_first(dtype: torch.dtype):
    def function(x):
        ends = torch.linspace(4.3, 7.9, 9, dtype=dtype), torch.linspace(x, x + 1.9, 50, dtype=dtype)
        return *ends, torch.linspace(0, 123456789, 7, dtype=torch.int64)

    assert_like_eager(function, torch.tensor(2.7), gradients=False)


def test_identity_of_a_symbolic_size_equals_eager():
    assert_like_eager(
        lambda x: x @ torch.eye(x.shape[1]) + torch.arange(x.shape[1]),
        torch.randn(3, 5, requires_grad=True),
        dynamic=True,
    )


@pytest.mark.parametrize("strides", [(0, 1), (1, 0), (0, 0), (1, 1), (8, 2)], ids=str)
def test_memory_without_values_has_the_strides_asked_for(strides):
    def function():
        return torch.empty_strided((3, 4), strides)

    result = torch.compile(function, backend="ort_train", options={"fallback": "error"})()
    assert result.shape == (3, 4)
    assert result.stride() == strides


def test_memory_in_order_whose_symbolic_sizes_might_be_zero_equals_eager():
    """torch makes the strides of such sizes with max(1, size)."""

    def function(x):
        y = torch.nn.functional.pad(x, (0, -x.shape[1] % 8)).reshape(2, -1, (x.shape[1] + 7) // 8)
        return y.new_empty_strided(y.shape, y.stride()).copy_(y).exp()

    for size in (5, 17):
        assert_like_eager(function, torch.randn(2, size), gradients=False, dynamic=True)


@pytest.fixture
def deterministic():
    before = torch.are_deterministic_algorithms_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)
    torch.utils.deterministic.fill_uninitialized_memory = filled


_EMPTY = {
    "empty": lambda x: (torch.empty(3), torch.empty(2, dtype=torch.int32), torch.empty(2, dtype=torch.bool)),
    "empty_like": lambda x: (torch.empty_like(x.t()), torch.empty_like(x * 2, dtype=torch.int8)),
    "new_empty": lambda x: (x.new_empty(x.shape[0], 2) + 1, x.half().new_empty(2)),
    "strided": lambda x: (torch.empty_strided((2, 2), (1, 2)), x.new_empty_strided((2, 2), (1, 2))),
    "permuted": lambda x: torch.empty_permuted((2, 3), (1, 0)),
    "resized": lambda x: (x.clone().resize_(9), torch.empty(0).resize_(3)),
    "filled": lambda x: torch.empty_like(x).fill_(3) + torch.empty_like(x).normal_(),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("function", _EMPTY.values(), ids=_EMPTY)
@pytest.mark.usefixtures("deterministic")
def test_memory_without_values_is_filled_under_deterministic_algorithms(function, dynamic):
    x = torch.ones(2, 3)
    compiled = torch.compile(function, backend="ort_train", dynamic=dynamic)
    torch.manual_seed(0)
    found = compiled(x)
    torch.manual_seed(0)
    torch.testing.assert_close(found, function(x), rtol=0, atol=0, equal_nan=True, check_stride=True)


@pytest.mark.usefixtures("deterministic")
def test_the_setting_at_the_call_decides_whether_memory_is_filled():
    compiled = torch.compile(lambda: torch.empty(3), backend="ort_train")
    torch.use_deterministic_algorithms(False)
    compiled()
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    compiled()
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert compiled().isnan().all()
