"""Tests of Python's numbers with the values of a dtype's: as torch has them in a tensor."""

from __future__ import annotations

import math
import random
import struct

import pytest
import torch

from ort_dynamo.graph.rounded_numbers import ceil, divide, floor, power_of, round_to, truncate

EDGES = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e300, -1e300, 5e-324, 65504.0, 65519.99, 65520.0, 2.0**24 + 1]
EDGES += [2.0**24 + 3, 2.0**-24, 2.0**-25, 2.0**-126, 2.0**-149, 2.0**-150, 1.0001 * 2.0**-150]
EDGES += [3.4028235677973362e38, 3.4028235677973366e38]


def same(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_float_has_the_value_that_a_tensor_holds(dtype: torch.dtype) -> None:
    generator = random.Random(0)
    numbers = [*EDGES, *(struct.unpack("<d", generator.randbytes(8))[0] for _ in range(2000))]
    numbers += [(generator.random() - 0.5) * 2.0 ** generator.randint(-160, 130) for _ in range(4000)]
    if dtype in (torch.bfloat16, torch.float16):  # torch rounds to float32 first
        numbers = torch.tensor(numbers).tolist()
    held = torch.tensor(numbers, dtype=torch.float64).to(dtype).tolist()
    wrong = [
        (number, kept) for number, kept in zip(numbers, held, strict=True) if not same(round_to(number, dtype), kept)
    ]
    assert not wrong


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64])
def test_an_integer_wraps_as_in_a_tensor(dtype: torch.dtype) -> None:
    numbers = [0, 1, -1, 127, 128, -129, 255, 256, 70000, 2**31 - 1, 2**31, -(2**31) - 1, 2**63 - 1, -(2**63)]
    assert [round_to(number, dtype) for number in numbers] == torch.tensor(numbers).to(dtype).tolist()
    assert round_to(2**63, torch.int64) == -(2**63)


def test_whole_numbers_of_infinities_and_nan_are_themselves() -> None:
    for function in (floor, ceil):
        found = [function(number, torch.float32) for number in (2.5, -2.5, math.inf, -math.inf)]
        expected = [math.floor, math.ceil][function is ceil]
        assert found == [expected(2.5), expected(-2.5), math.inf, -math.inf]
        assert math.isnan(function(math.nan, torch.float32))
    assert [truncate(number, torch.float32) for number in (2.5, -2.5, 3)] == [2, -2, 3]


def test_quotients_and_powers_are_those_of_tensors() -> None:
    numbers = [0.0, -0.0, 1.0, -1.0, 2.5, -3.0, 1e200, math.inf, -math.inf, math.nan]
    for a in numbers:
        for b in numbers:
            left, right = torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)
            assert same(divide(a, b), float(left / right)), (a, b)
            assert same(power_of(a, b), float(left**right)), (a, b)


def test_an_open_size_is_rounded_down_from_a_rounding_error_below_a_whole_number() -> None:
    def lengths(x: torch.Tensor) -> torch.Tensor:
        size = x.shape[0] * round_to(1.4, torch.float32)
        size = round_to(size, torch.float32)
        return x.new_ones(floor(size, torch.float32), ceil(size, torch.float32), truncate(size, torch.float32))

    compiled = torch.compile(lengths, backend="eager", fullgraph=True, dynamic=True)
    for size in (5, 6, 10, 11):
        found = compiled(torch.ones(size)).shape
        assert found == lengths(torch.ones(size)).shape, size
        assert found[0] == int(torch.tensor(1.4) * size)
