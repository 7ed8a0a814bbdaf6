"""Quotients and remainders; of integers, also by zero."""

import itertools

import pytest
import torch

from ort_dynamo.errors import IntegerDivisionByZeroError
from ort_dynamo.testing import assert_like_eager

INTEGERS = [torch.int8, torch.int16, torch.uint8, torch.int32, torch.int64]
QUOTIENTS = {
    "floor_divide": torch.floor_divide,
    "remainder": torch.remainder,
    "fmod": torch.fmod,
    "trunc": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "floor": lambda a, b: torch.div(a, b, rounding_mode="floor"),
}
by_each = pytest.mark.parametrize("function", QUOTIENTS.values(), ids=QUOTIENTS)


def all_of_them(a, b):
    return [function(a, b) for function in QUOTIENTS.values()]


@pytest.mark.parametrize("mode", [None, "trunc", "floor"])
def test_rounded_quotients_equal_eager(mode):
    a = torch.tensor([7.0, -7.0, 1.0, 0.3, -0.3, 6.0, 5.5, 0.0, 1.0])
    b = torch.tensor([2.0, 2.0, 0.1, 0.1, 0.1, -4.0, -5.5, 3.0, -0.1])
    n = torch.tensor([7, -7, 6, -6, 0])
    assert_like_eager(
        lambda a, b, n: (
            torch.div(a, b, rounding_mode=mode),
            torch.div(a, 0.1, rounding_mode=mode),
            torch.div(n, 4, rounding_mode=mode),
            torch.div(n, -4, rounding_mode=mode),
            torch.div(n.int(), 2.5, rounding_mode=mode),
        ),
        a,
        b,
        n,
        gradients=False,
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mode", ["trunc", "floor"])
def test_quotients_of_halves_are_rounded_before_they_are_cut_to_whole_numbers(mode, dtype):
    """Also a product before the division, which torch rounds."""
    torch.manual_seed(0)
    a, b = (3 * torch.randn(20000)).to(dtype), (0.3 * torch.randn(20000)).to(dtype)
    compiled = torch.compile(torch.div, backend="ort_train")
    scaled = torch.compile(lambda a, b: torch.div(a * 1.3, b, rounding_mode=mode), backend="ort_train")
    for divisor in (b, b[:1], b[0], 0.3):
        assert torch.equal(compiled(a, divisor, rounding_mode=mode), torch.div(a, divisor, rounding_mode=mode))
    assert torch.equal(scaled(a, b), torch.div(a * 1.3, b, rounding_mode=mode))


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integer_quotients_by_tensors_equal_eager(dtype):
    ends = torch.iinfo(dtype)
    a = torch.tensor([ends.min + 1, ends.max, 0, 1, 7, 100, ends.max - 3], dtype=dtype)
    divisors = [
        torch.tensor([e.max, 1, 2, 3, 7] + ([-1, -2, -7, e.min] if e.min else []), dtype=other)
        for other, e in ((other, torch.iinfo(other)) for other in INTEGERS)
    ]

    def every(a, *divisors):
        return [all_of_them(x, y) for x, b in itertools.product([a[:, None], a[0]], divisors) for y in (b, b[1])]

    assert_like_eager(every, a, *divisors, gradients=False)


def test_integer_quotients_by_symbols_equal_eager():
    def function(x, n):
        return n // (x.shape[0] - 5), n % (x.shape[0] - 5), 100 % n, torch.fmod(n, 2 - x.shape[0])

    for size in (3, 4, 9):
        assert_like_eager(function, torch.ones(size), torch.tensor([-7, 7, 3]), gradients=False, dynamic=True)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_least_integer_by_a_tensor_of_minus_one_wraps_around(dtype):
    least = torch.full((9,), torch.iinfo(dtype).min, dtype=dtype)  # eager's division by "trunc" ends the process
    found = torch.compile(all_of_them, backend="ort_train")(least, torch.full((9,), -1, dtype=dtype))
    zeros = torch.zeros_like(least)
    for value, expected in zip(found, (least, zeros, zeros, least, least), strict=True):
        assert torch.equal(value, expected)


@by_each
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64])
def test_a_zero_divisor_is_an_error_as_in_eager(function, dtype):
    a, b = torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=dtype), torch.tensor([1, 0, 2], dtype=dtype)
    run = torch.compile(lambda a, b: function(a, b).float() * 0.5, backend="ort_train", dynamic=True)
    for x, y in [(a, b), (a, b[1]), (a[0, 0], b[1])]:
        assert_like_eager(function, x, y + 1, gradients=False)
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            function(x, y)
        with pytest.raises(IntegerDivisionByZeroError, match="ZeroDivisionError"):
            run(x, y)


def test_a_zero_divisor_is_not_taken_for_an_index_out_of_bounds():
    def function(x, a, b):
        return x[a // b], x[a]

    x, a = torch.randn(3, 4), torch.tensor([2, 1])
    assert_like_eager(function, x, a, a, gradients=False)
    with pytest.raises(IntegerDivisionByZeroError):
        torch.compile(function, backend="ort_train")(x, a, a * 0)


def test_the_number_zero_as_a_divisor_raises_in_eager():
    for number, dtype in ((0, torch.int64), (256, torch.uint8)):
        run = torch.compile(lambda x, n=number: x // n, backend="ort_train")
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            run(torch.arange(3).to(dtype))


@by_each
def test_a_zero_divisor_without_a_dividend_is_none(function):
    a, none = torch.tensor([[5], [7]]), torch.zeros(0, dtype=torch.int64)
    assert_like_eager(function, none, torch.tensor(0), gradients=False)
    assert_like_eager(function, none, torch.zeros(1, dtype=torch.int64), gradients=False)
    assert_like_eager(function, a, none, gradients=False)


@pytest.mark.parametrize("number", [7, 2.5])
def test_quotients_of_a_number_by_a_tensor_equal_eager(number):
    n = torch.tensor([[1, 2, 3], [4, 5, 6]])
    assert_like_eager(lambda x, n: (number // x, number // n.t(), number % n, number / n), n + 0.5, n, gradients=False)


def test_a_size_that_a_narrow_dtype_holds_as_zero_is_a_division_by_zero():
    run = torch.compile(lambda x: x // x.shape[0], backend="ort_train", dynamic=True)
    assert run(torch.arange(5, dtype=torch.uint8)).tolist() == [0] * 5
    with pytest.raises(IntegerDivisionByZeroError):
        run(torch.arange(256).to(torch.uint8))
