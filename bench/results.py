"""Results of benchmarks: as JSON beside pytest-benchmark's own numbers, and as a table at the end of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from bench.interleaved import Spread, Timings

__all__ = ["PAIRS", "PRODUCTS", "Compare", "Result", "Row", "Rows", "format_rows", "format_table"]

PRODUCTS = "products"
"""The contestant that runs nothing but the matrix products of eager's step."""

PAIRS = (("ort_train", "eager"), ("ort_train", "inductor"), ("inductor", "eager"), ("ort_train", PRODUCTS))
"""(numerator, denominator) of each ratio reported: below 1 the numerator is faster."""


class Compare(Protocol):
    """The type of the fixture `compare`."""

    def __call__(
        self,
        question: str,
        case: str,
        contestants: Mapping[str, Callable[[], object]],
        rounds: int,
        calls: int = 1,
        worst_first: bool = False,
    ) -> None:
        """Run contestants interleaved and keep the result; `calls` is how many calls one run makes."""


class Rows(Protocol):
    """The type of the fixture `rows`."""

    def __call__(self, question: str, case: str, cells: Mapping[str, float | None]) -> None:
        """Keep a row of ratios that were not measured in one process, by the names of their columns."""


@dataclass(frozen=True)
class Row:
    """One case of one question whose samples are processes.

    Attributes:
        question: the table it belongs to.
        case: its name.
        cells: column -> a ratio; None where one of the two did not run.
    """

    question: str
    case: str
    cells: Mapping[str, float | None]


@dataclass(frozen=True)
class Result:
    """One case of one question.

    Attributes:
        question: the table it belongs to, e.g. "training step".
        case: its row, e.g. "bert".
        timings: the samples.
        calls: how many calls one sample is of.
        nodes: how many nodes ort_train compiled ("native") and left in eager ("eager"), forward and backward.
        absent: contestant -> why it did not take part.
        worst_first: whether the table of its question begins with the slowest, not with the first that ran.
    """

    question: str
    case: str
    timings: Timings
    calls: int
    nodes: Mapping[str, int]
    absent: Mapping[str, str] = field(default_factory=dict)
    worst_first: bool = False

    def as_json(self) -> dict[str, Any]:
        """For benchmark.extra_info. `seconds` are of one call, wall time, for scale only."""
        samples = self.timings.samples
        return {
            "question": self.question,
            "case": self.case,
            "rounds": min(map(len, samples.values())),
            "calls_per_round": self.calls,
            "ratios": {
                f"{above}/{below}": {"wall": dataclasses.asdict(wall), "cpu": dataclasses.asdict(cpu)}
                for above, below in PAIRS
                if (wall := self.timings.ratio(above, below, "wall"))
                and (cpu := self.timings.ratio(above, below, "cpu"))
            },
            "seconds": {name: self.timings.seconds(name).median / self.calls for name in samples},
            "ort_train_nodes": dict(self.nodes),
            "absent": dict(self.absent),
        }


def format_table(results: Sequence[Result]) -> list[str]:
    """The results of one question as lines of text; a ratio is spelled median [quartiles]."""
    pairs = [pair for pair in PAIRS if PRODUCTS not in pair or any(PRODUCTS in r.timings.samples for r in results)]
    heads = [f"{above}/{below}" for above, below in pairs]
    rows = [["", *heads, f"cpu {heads[0]}", "nodes in eager"]]
    if all(result.worst_first for result in results):
        results = sorted(results, key=_slowness, reverse=True)
    for result in results:
        walls = [_spell(result.timings.ratio(*pair, "wall")) for pair in pairs]
        nodes = f"{result.nodes['eager']} of {sum(result.nodes.values())}"
        rows.append([result.case, *walls, _spell(result.timings.ratio(*PAIRS[0], "cpu")), nodes])
    lines = _aligned(rows)
    reasons = {f"no {name}: {reason}" for result in results for name, reason in result.absent.items()}
    return lines + sorted(reasons)


def _slowness(result: Result) -> float:
    ratio = result.timings.ratio(*PAIRS[0], "wall")
    return 0.0 if ratio is None else ratio.median


def format_rows(rows: Sequence[Row]) -> list[str]:
    """The rows of one question as lines of text."""
    spelled = [[row.case, *("-" if cell is None else f"{cell:.2f}" for cell in row.cells.values())] for row in rows]
    return _aligned([["", *rows[0].cells], *spelled])


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _spell(spread: Spread | None) -> str:
    if spread is None:
        return "-"
    return f"{spread.median:.2f} [{spread.q1:.2f} {spread.q3:.2f}]"
