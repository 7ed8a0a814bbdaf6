"""Compares the statistics of two runs, value by value."""

from __future__ import annotations

import math
import re
from collections import defaultdict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from numbers import Real

from ort_dynamo.errors import InvalidArgumentError
from ort_dynamo.notebook import ShownAsText
from ort_dynamo.statistics.run import RunStatistics
from ort_dynamo.statistics.values import INPUT, ValueStatistics, lined_up, short, sizes

__all__ = ["StatisticsComparison", "ValueDifference", "compare_statistics"]

_MOST = 50
"""Rows that a printed comparison has."""

_PLACE = re.compile(r'^File ".*?", line \d+, in ')


@dataclass(frozen=True)
class ValueDifference:
    """A value that differs between two runs.

    Attributes:
        first: its statistics in the first run.
        second: those in the second run.
        statistic: the attribute that differs: "shape", "nan" or "inf", else that of "min", "max", "mean" and "std" that
            differs most.
        difference: by how much, relative to the largest finite element of both runs; infinite for "shape", "nan" and
            "inf".
    """

    first: ValueStatistics
    second: ValueStatistics
    statistic: str
    difference: float


@dataclass(frozen=True, repr=False)
class StatisticsComparison(ShownAsText):
    """The comparison of two runs. Printed, it is a table of the values that differ.

    Attributes:
        differences: the values that differ by more than the tolerance, in the order in which the first run computed
            them: the first of them is where the runs begin to differ.
        compared: the number of values that both runs have.
        only_first, only_second: the values that one run alone has.
        tolerance: the relative difference above which a value is listed.
    """

    differences: tuple[ValueDifference, ...]
    compared: int
    only_first: tuple[ValueStatistics, ...]
    only_second: tuple[ValueStatistics, ...]
    tolerance: float

    def __str__(self) -> str:
        lines = [
            f"{self.compared} values compared, {len(self.differences)} differ by more than {self.tolerance:g}; "
            f"{len(self.only_first)} in the first run alone, {len(self.only_second)} in the second"
        ]
        head = ["step", "graph", "node", "operator", "module", "statistic", "first", "second", "difference"]
        shown = self.differences[:_MOST]
        if shown:
            lines += lined_up(head, map(_row, shown))
        if left := len(self.differences) - len(shown):
            lines.append(f"… and {left} more")
        return "\n".join(lines)


def _row(one: ValueDifference) -> list[str]:
    value = one.first
    both = [_spelled(getattr(side, one.statistic)) for side in (one.first, one.second)]
    place = [str(value.step), f"{value.graph} {value.role}", value.node, value.overload, value.module]
    return [*place, one.statistic, *both, short(one.difference)]


def _spelled(value: object) -> str:
    if isinstance(value, tuple):
        return sizes(value)
    return "none" if value is None else short(value) if isinstance(value, float) else str(value)


def compare_statistics(first: RunStatistics, second: RunStatistics, *, tolerance: float = 1e-3) -> StatisticsComparison:
    """Compare the statistics of two runs of one model, such as one in float32 and one in bfloat16.

    Two values are the same one if step, graph, role, module, operator and the text of the line agree. If both runs have
    as many such values, their order decides, and names and line numbers may differ. Otherwise only those of equal names
    and shapes are compared, as are inputs of graphs.

    Args:
        first: the run that gives the order.
        second: the other run.
        tolerance: the difference above which a value is listed, relative to its largest finite element in both runs.

    Raises:
        InvalidArgumentError: `tolerance` is not a number of 0 or more, or a run is something else, such as a path.
    """
    if isinstance(tolerance, bool) or not isinstance(tolerance, Real) or not tolerance >= 0:
        raise InvalidArgumentError(
            function="compare_statistics", name="tolerance", value=tolerance, expected="a number of 0 or more"
        )
    for name, run in (("first", first), ("second", second)):
        if not isinstance(run, RunStatistics):
            expected = "the statistics of a run; load_statistics reads those of a file"
            raise InvalidArgumentError(function="compare_statistics", name=name, value=run, expected=expected)
    pairs = _paired(first.statistics, second.statistics)
    paired = set(pairs.values())
    only_first = tuple(one for index, one in enumerate(first.statistics) if index not in pairs)
    only_second = tuple(one for index, one in enumerate(second.statistics) if index not in paired)
    differences = []
    for index, value in enumerate(first.statistics):
        if index in pairs:
            other = second.statistics[pairs[index]]
            statistic, difference = _difference(value, other)
            if difference > tolerance:
                differences.append(ValueDifference(value, other, statistic, difference))
    return StatisticsComparison(tuple(differences), len(pairs), only_first, only_second, tolerance)


def _paired(first: Sequence[ValueStatistics], second: Sequence[ValueStatistics]) -> dict[int, int]:
    """Return the index of each value of the first run that the second has -> its index there."""
    theirs = _grouped(second)
    pairs: dict[int, int] = {}
    for key, ours in _grouped(first).items():
        others = theirs.get(key, [])
        if len(ours) == len(others) and first[ours[0]].overload != INPUT:
            pairs |= zip(ours, others, strict=True)
            continue
        named: defaultdict[Hashable, deque[int]] = defaultdict(deque)
        for index in others:
            named[second[index].node, second[index].shape].append(index)
        for index in ours:
            if same := named[first[index].node, first[index].shape]:
                pairs[index] = same.popleft()
    return pairs


def _grouped(values: Sequence[ValueStatistics]) -> dict[Hashable, list[int]]:
    """Give the indices of values that only their names and their order tell apart."""
    found: defaultdict[Hashable, list[int]] = defaultdict(list)
    for index, one in enumerate(values):
        item = one.node[one.node.find("[") :] if "[" in one.node else ""
        found[one.step, one.graph, one.role, one.module, one.overload, item, _PLACE.sub("", one.line)].append(index)
    return found


def _difference(first: ValueStatistics, second: ValueStatistics) -> tuple[str, float]:
    """Return the statistic that differs most, and by how much."""
    for name in ("shape", "nan", "inf"):
        if getattr(first, name) != getattr(second, name):
            return name, math.inf
    if first.min is None or second.min is None:  # no finite elements in one, so in neither: the counts agree
        return "min", 0.0
    extremes = [abs(one) for side in (first, second) for one in (side.min, side.max) if one is not None]
    scale = max(extremes) or 1.0
    apart = {name: abs(getattr(first, name) / scale - getattr(second, name) / scale) for name in _COMPARED}
    return max(apart.items(), key=lambda pair: pair[1])


_COMPARED = ("min", "max", "mean", "std")
