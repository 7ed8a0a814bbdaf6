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
