"""A difference counts where the error against float64 is clearly larger than eager's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ort_dynamo.verification.compare import difference, differences, first_problem

ONES = torch.ones(4)


def unknown() -> Any:
    return None


def test_equal_values_need_no_float64() -> None:
    def never() -> Any:
        raise AssertionError("it is not asked for")

    assert difference(ONES + 1e-6, ONES, never) == ""


def test_an_error_that_eager_has_as_well_is_rounding() -> None:
    exact = ONES.double() + 0.001
    assert difference(ONES + 0.002, ONES, lambda: exact) == ""
    said = difference(ONES + 0.02, ONES, lambda: exact)
    assert said == "off by 0.02, largest entry 1; its error against float64 is 0.019, eager's 0.001"


@pytest.mark.parametrize(
    ("found", "expected", "said"),
    [
        (ONES.double(), ONES, "has dtype torch.float64, eager has torch.float32"),
        (ONES[:3], ONES, "has shape"),
        (torch.ones(2, 3).t(), torch.ones(3, 2), "has strides (1, 3), eager has (2, 1)"),
        (torch.tensor([1, 2, 3]), torch.tensor([1, 2, 4]), "1 of 3 entries differ"),
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 2.0]), "off by nan"),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, float("inf")]), "1 infinite or NaN entries differ"),
        (None, ONES, "is NoneType, eager gives a tensor"),
        (3, 4, "3 is not 4"),
    ],
)
def test_differences_are_described(found: Any, expected: Any, said: str) -> None:
    assert said in difference(found, expected, unknown, strides=True)


def test_a_finite_number_where_eager_overflows_is_right_if_float64_has_it() -> None:
    eager = torch.tensor([1.0, float("inf")], dtype=torch.float16)
    ours = torch.tensor([1.0, 60000.0], dtype=torch.float16)
    assert difference(ours, eager, unknown)
    assert difference(ours, eager, lambda: torch.tensor([1.0, float("inf")], dtype=torch.float64))


@pytest.mark.parametrize(
    ("found", "exact", "agrees"),
    [
        (3.785337448120117, None, True),
        (3.79, None, False),
        (3.79, 3.8, True),
        (3.79, 3.785, False),
        (float("inf"), None, False),
    ],
)
def test_numbers_that_a_step_reads_round_as_tensors_do(found: float, exact: float | None, agrees: bool) -> None:
    assert (difference(found, 3.7853379249572754, lambda: exact) == "") == agrees
    assert difference(float("nan"), float("nan"), unknown) == ""
    assert difference(found, float("nan"), unknown) != ""


def test_a_hundredth_of_the_integers_may_differ() -> None:
    numbers = torch.arange(1000)
    assert difference(numbers.where(numbers > 9, -1), numbers, unknown) == ""
    assert "20 of 1000 entries" in difference(numbers.where(numbers > 19, -1), numbers, unknown)


def test_a_small_gradient_is_measured_by_the_largest_one() -> None:
    small = {"gradient of a": ONES * 1e-7, "gradient of b": ONES * 1e-6, "output 0": ONES}
    wrong = {**small, "gradient of a": ONES * 2e-7}
    (found,) = differences(wrong, small, dict)
    assert str(found) == "gradient of a: off by 1e-07, largest entry 1e-07"
    beside = {**small, "gradient of b": ONES}
    assert not differences({**beside, "gradient of a": ONES * 2e-7}, beside, dict), "it is rounding beside 1"


def test_values_that_one_run_lacks_are_differences() -> None:
    found = differences({"output 0": 1}, {"output 1": 1}, dict)
    assert [one.name for one in found] == ["output 1", "output 0"]


def test_a_gradient_of_zeros_stands_for_none_and_not_the_other_way_round() -> None:
    zeros = torch.zeros(4)
    for expected in ({"gradient of a": None}, {}):
        assert not differences({"gradient of a": zeros}, expected, dict)
        assert not differences({"gradient of a": zeros.to_sparse()}, expected, dict)
        for wrong in (ONES, zeros / 0):
            assert [one.name for one in differences({"gradient of a": wrong}, expected, dict)] == ["gradient of a"]
    for found in ({"gradient of a": None}, {}):
        assert [one.name for one in differences(found, {"gradient of a": zeros}, dict)] == ["gradient of a"]
    assert differences({"output a": zeros}, {"output a": None}, dict)


def test_a_result_that_cancels_is_measured_by_its_inputs() -> None:
    zero, noise = torch.zeros(2), torch.full((2,), 1e-11)
    assert first_problem([noise], [zero], lambda: [zero.double()], inputs=[ONES]) == ""
    assert first_problem([noise * 100], [zero], lambda: [zero.double()], inputs=[ONES])
    assert first_problem([None, ONES], [zero, 2 * ONES], lambda: [None, None]).startswith("result 1 off by 1")


def test_an_error_as_large_as_is_usual_in_the_program_is_rounding() -> None:
    expected = {f"gradient of {name}": ONES + 0.01 for name in "abc"} | {"gradient of d": ONES}
    exact = {name: ONES.double() for name in expected}
    found = {**expected, "gradient of d": ONES + 0.03}
    assert not differences(found, expected, lambda: exact)
    (wrong,) = differences({**found, "gradient of d": ONES + 0.06}, expected, lambda: exact)
    assert wrong.name == "gradient of d"
