"""Two runs side by side."""

from __future__ import annotations

import html
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ort_dynamo import RunStatistics, StatisticsComparison, ValueStatistics, collect_statistics, compare_statistics
from ort_dynamo.errors import InvalidArgumentError

VALUE = ValueStatistics(
    step=0,
    graph=0,
    role="forward",
    index=1,
    node="mul",
    overload="aten.mul.Tensor",
    module="0 (Scale)",
    line='File "a.py", line 3, in forward return x * 2',
    dtype="float32",
    shape=(2,),
    min=-2.0,
    max=4.0,
    mean=1.0,
    std=3.0,
    nan=0,
    inf=0,
)


def compared(*changes: dict[str, Any], **tolerance: float) -> StatisticsComparison:
    other = RunStatistics([replace(VALUE, **change) for change in changes])
    return compare_statistics(RunStatistics([VALUE]), other, **tolerance)


@pytest.mark.parametrize(
    ("change", "statistic", "difference"),
    [
        ({"max": 4.5}, "max", 0.5 / 4.5),
        ({"min": -1.0, "mean": 1.5}, "min", 0.25),
        ({"std": 2.0}, "std", 0.25),
        ({"nan": 1}, "nan", math.inf),
        ({"inf": 1, "max": 9.0}, "inf", math.inf),
        ({"shape": (3,)}, "shape", math.inf),
    ],
)
def test_the_statistic_that_differs_most_is_named(change: dict[str, Any], statistic: str, difference: float) -> None:
    (found,) = compared(change).differences
    assert (found.first, found.second, found.statistic) == (VALUE, replace(VALUE, **change), statistic)
    assert found.difference == pytest.approx(difference)


@pytest.mark.parametrize("tolerance", [math.nan, -1e-3, "0.1", None, True])
def test_the_tolerance_is_a_number_of_zero_or_more(tolerance: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="tolerance"):
        compared({"mean": 1.1}, tolerance=tolerance)
    assert compared({"mean": 1.1}, tolerance=np.float32(0)).differences


def test_the_tolerance_is_relative_to_the_largest_element() -> None:
    assert len(compared({"mean": 1.1}, tolerance=0.02).differences) == 1
    assert not compared({"mean": 1.1}, tolerance=0.03).differences


def test_names_and_line_numbers_do_not_tell_values_apart() -> None:
    found = compared({"node": "mul_3", "index": 9, "line": 'File "b.py", line 80, in forward return x * 2'})
    assert (found.compared, found.differences, found.only_first, found.only_second) == (1, (), (), ())


@pytest.mark.parametrize(
    "change",
    [
        {"step": 1},
        {"graph": 1},
        {"role": "backward"},
        {"module": "1 (Scale)"},
        {"overload": "aten.add.Tensor"},
        {"line": 'File "a.py", line 3, in forward return x + 2'},
        {"node": "mul[1]"},
    ],
)
def test_another_value_is_of_one_run_alone(change: dict[str, Any]) -> None:
    found = compared(change)
    assert (found.compared, found.only_first, found.only_second) == (0, (VALUE,), (replace(VALUE, **change),))


def test_equal_values_are_matched_in_their_order() -> None:
    first = RunStatistics([VALUE, replace(VALUE, max=8.0)])
    second = RunStatistics([VALUE, replace(VALUE, max=8.0), replace(VALUE, max=16.0)])
    found = compare_statistics(first, second)
    assert (found.compared, found.differences) == (2, ())
    assert [one.max for one in found.only_second] == [16.0]


def test_values_without_finite_elements_agree_where_their_counts_do() -> None:
    empty = replace(VALUE, min=None, max=None, mean=None, std=None, nan=2)
    assert not compare_statistics(RunStatistics([empty]), RunStatistics([empty])).differences


def test_zeros_and_huge_numbers_are_compared() -> None:
    zero = replace(VALUE, min=0.0, max=0.0, mean=0.0, std=0.0)
    huge = replace(VALUE, min=-1.5e308, max=1.5e308, mean=0.0, std=1.5e308)
    assert not compare_statistics(RunStatistics([zero]), RunStatistics([zero])).differences
    (found,) = compare_statistics(RunStatistics([huge]), RunStatistics([replace(huge, max=-1.5e308)])).differences
    assert (found.statistic, found.difference) == ("max", 2.0)


class Scale(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def ran(factor: float) -> RunStatistics:
    torch.manual_seed(0)
    torch.compiler.reset()
    model = nn.Sequential(nn.Linear(4, 4), Scale(factor), nn.Linear(4, 4))
    with collect_statistics() as run:
        torch.compile(model, backend="ort_train")(torch.randn(3, 4)).sum().backward()
    return run


def test_two_runs_of_one_model_agree() -> None:
    found = compare_statistics(ran(2.0), ran(2.0), tolerance=0.0)
    assert found.compared > 8
    assert (found.differences, found.only_first, found.only_second) == ((), (), ())
    assert str(found) == (
        f"{found.compared} values compared, 0 differ by more than 0; 0 in the first run alone, 0 in the second"
    )


def test_the_first_difference_is_where_the_runs_part() -> None:
    found = compare_statistics(ran(2.0), ran(3.0))
    first = found.differences[0]
    assert (first.first.module, first.first.overload) == ("1 (Scale)", "aten.mul.Tensor")
    assert first.first.max is not None
    assert first.second.max == pytest.approx(first.first.max * 1.5)
    assert {one.first.module for one in found.differences} >= {"1 (Scale)", "2 (Linear)"}
    head, row = str(found).splitlines()[1:3]
    assert head.split()[-4:] == ["statistic", "first", "second", "difference"]
    assert "aten.mul.Tensor" in row


def run_of(*changes: dict[str, Any]) -> RunStatistics:
    return RunStatistics([replace(VALUE, **change) for change in changes])


def test_a_value_that_one_run_alone_shows_shifts_no_other() -> None:
    first = run_of({"node": "mul", "max": 4.0}, {"node": "mul_2", "max": 8.0})
    second = run_of({"node": "mul", "max": 4.0}, {"node": "mul_1", "max": 6.0}, {"node": "mul_2", "max": 8.0})
    found = compare_statistics(first, second)
    assert (found.compared, found.differences, found.only_first) == (2, (), ())
    assert [one.node for one in found.only_second] == ["mul_1"]
    assert [one.node for one in compare_statistics(second, first).only_first] == ["mul_1"]


def test_inputs_are_compared_by_their_names() -> None:
    first = run_of({"overload": "input", "node": "tanh", "max": 1.0})
    second = run_of({"overload": "input", "node": "addmm", "max": 5.0})
    found = compare_statistics(first, second)
    assert (found.compared, len(found.only_first), len(found.only_second)) == (0, 1, 1)


@pytest.mark.parametrize("options", [{"graph_optimization": "disable"}, {"memory_budget": 0.3}])
def test_runs_that_show_other_values_do_not_differ(options: dict[str, Any]) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.tanh(self.up(x))

    model, x = nn.Sequential(*[Layer() for _ in range(4)]), torch.randn(4, 8)
    runs = []
    for chosen in ({}, options):
        torch._dynamo.reset()
        with collect_statistics() as run:
            torch.compile(model, backend="ort_train", options=chosen)(x).sum().backward()
        runs.append(run)
    found = compare_statistics(*runs)
    assert not found.differences
    assert found.compared > 20


@pytest.mark.parametrize("name", ["first", "second"])
def test_a_path_is_no_run(name: str) -> None:
    runs: dict[str, Any] = {"first": RunStatistics(), "second": RunStatistics(), name: "float32.json"}
    with pytest.raises(InvalidArgumentError, match=rf"{name}='float32.json': .*load_statistics reads"):
        compare_statistics(**runs)


def test_a_run_and_a_comparison_show_as_text_in_a_notebook() -> None:
    for found in (RunStatistics([VALUE]), compared({"max": 4.5})):
        assert repr(found) == str(found)
        assert found._repr_html_() == f"<pre>{html.escape(str(found))}</pre>"
