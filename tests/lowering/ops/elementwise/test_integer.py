"""Shifts, powers and divisors of integers."""

import pytest
import torch

from ort_dynamo.testing import assert_like_eager

DTYPES = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FUNCTIONS = [torch.bitwise_left_shift, torch.bitwise_right_shift, torch.gcd, torch.lcm, torch.pow]
NUMBERS = [0, 1, 2, 3, 5, 12, 18, 36, 97, 127, -1, -2, -3, -12, -97]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_all_dtypes_equal_eager(function):
    def tensor(numbers, dtype):
        return torch.tensor([abs(n) if dtype == torch.uint8 else n for n in numbers], dtype=dtype)

    # Powers and shifts overflow, and wrap around.
    pairs = [(tensor(NUMBERS, d)[:, None], tensor([0, 1, 2, 6, 7, 8, 9, 31, 63, 64, 70, -1, -2], d)) for d in DTYPES]
    assert_like_eager(lambda *pairs: [function(a, b) for a, b in pairs], *pairs, gradients=False)


def test_operators_with_numbers_equal_eager():
    n = torch.tensor([0, 5, -3, 127, -128])
    assert_like_eager(
        lambda n: (n << 3, n >> 3, n.int() << 40, n >> 64, 1 << n, 1000 >> n, n.to(torch.uint8) >> 8, 2**n, (-2) ** n),
        n,
        gradients=False,
    )


def test_mixed_dtypes_equal_eager():
    a, b = torch.tensor([6, 4, -15]), torch.tensor([4, 3, 6], dtype=torch.int8)
    assert_like_eager(lambda a, b: [f(p, q) for f in FUNCTIONS for p, q in ((a, b), (b, a))], a, b, gradients=False)


def test_nothing_and_single_numbers_equal_eager():
    assert_like_eager(
        lambda a, b: [f(p, q) for f in FUNCTIONS for p, q in ((a, b), (b, b))],
        torch.empty(0, 3, dtype=torch.int64),
        torch.tensor(3),
        gradients=False,
    )


def test_symbolic_sizes_equal_eager():
    a, b = torch.arange(15).reshape(3, 5), torch.arange(5)
    assert_like_eager(lambda a, b: [function(a, b) for function in FUNCTIONS], a, b, gradients=False, dynamic=True)


SIGNED = [torch.int8, torch.int16, torch.int32, torch.int64]


@pytest.mark.parametrize("dtype", SIGNED, ids=str)
@pytest.mark.parametrize("divisor", [3, 7, -3, -1])
def test_the_ends_of_an_integer_type_are_divided_like_all_others(dtype, divisor):
    def function(x):
        floor = torch.div(x, divisor, rounding_mode="floor")
        return floor, x // divisor, torch.remainder(x, divisor), torch.fmod(x, divisor)

    ends = torch.iinfo(dtype)
    near = [ends.min, ends.min + 1, ends.max, ends.max - 1, ends.max // 1024 + 1, -1, 0, 1]
    assert_like_eager(function, torch.tensor(near, dtype=dtype), gradients=False)


@pytest.mark.parametrize("dtype", SIGNED, ids=str)
def test_a_truncating_division_by_minus_one_ends_no_process(dtype):
    def function(x):
        return torch.div(x, -1, rounding_mode="trunc")

    least = torch.iinfo(dtype).min
    x = torch.tensor([least] * 9 + [5], dtype=dtype)  # eager ends the process, so there is nothing to compare with
    assert torch.compile(function, backend="ort_train")(x).tolist() == [least] * 9 + [-5]


def test_a_divisor_that_is_zero_in_the_tensors_type_raises_as_in_eager():
    x = torch.tensor([1, 2], dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        torch.compile(lambda x: torch.remainder(x, 256), backend="ort_train")(x)


def test_int64_beyond_32_bits_keep_their_order():
    # Pairs whose upper halves are equal and whose lower halves differ in their first bit.
    x = torch.tensor([0, 1, 2**31, 2**31 - 1, -3, -(2**31) - 1, 2**33, -(2**35), 2**63 - 1, -(2**63), 7])
    other = x.flip(0)[:, None]

    def function(x, other):
        return (
            *(torch.maximum(x, other), torch.minimum(x, other), x.sign(), torch.relu(x - 5), x.cummax(0), x.cummin(0)),
            *(x.clamp(min=2**31), x.clamp(max=-(2**31) - 5), x.clamp(0, 2**31), x.clamp(other, other + 1)),
            *(torch.aminmax(x), x.sort(), x.abs(), torch.fmod(x, 2**62 + 1)),
        )

    assert_like_eager(function, x, other, gradients=False)


NUMBERS_OUT_OF_RANGE = {
    "fill": lambda x, n: torch.full_like(x, n),
    "fill in place": lambda x, n: x.clone().fill_(n),
    "pad": lambda x, n: torch.nn.functional.pad(x, (1, 1), value=n),
    "masked fill": lambda x, n: x.masked_fill(x > 1, n),
    "index fill": lambda x, n: x.index_fill(0, torch.tensor([0]), n),
    "scatter": lambda x, n: x.scatter(0, torch.tensor([0]), n),
    "threshold": lambda x, n: torch.nn.functional.threshold(x, n, 1),
    "clamp": lambda x, n: x.clamp(max=n),
    "add": lambda x, n: x + n,
    "add times a number": lambda x, n: torch.add(x, x, alpha=n),
    "multiply": lambda x, n: x * n,
    "compare": lambda x, n: (x == n, x < n, n < x),
    "choose": lambda x, n: torch.where(x > 1, x, n),
    "logical and": lambda x, n: torch.logical_and(x, torch.tensor(n)),
    "subtract": lambda x, n: x - n,
}


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.bool], ids=str)
@pytest.mark.parametrize("name", NUMBERS_OUT_OF_RANGE)
def test_a_number_that_a_narrow_integer_does_not_hold_is_treated_as_in_eager(name, dtype):
    """It wraps around, widens the result, or raises."""
    function, x = NUMBERS_OUT_OF_RANGE[name], torch.tensor([0, 1, 2, 5, 100]).to(dtype)
    for number in (300, -200, 2**40, -0.5, float("inf")):
        torch._dynamo.reset()
        compiled = torch.compile(lambda x, n=number: function(x, n), backend="ort_train")
        try:
            expected = function(x, number)
        except (RuntimeError, NotImplementedError) as error:
            with pytest.raises(type(error)):
                compiled(x)
        else:
            torch.testing.assert_close(compiled(x), expected, equal_nan=True, msg=str(number))
