"""The statistics of one value, as a row of a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["INPUT", "ValueStatistics", "lined_up", "short", "sizes"]

INPUT = "input"
"""The operator of an input of a graph."""


@dataclass(frozen=True)
class ValueStatistics:
    """The statistics of one value in one run of a graph.

    Attributes:
        step: the number of the training step, from 0.
        graph: the number of the compiled graph, from 0 in the order of their first runs. Forward and backward share it.
        role: "forward", "backward", "inference" or "training".
        index: the place of the node in its graph.
        node: its name in the graph, such as "addmm" or "native_layer_norm[0]".
        overload: its operator, such as "aten.addmm.default"; "input" of an input of the graph.
        module: the innermost module that called the operator, such as "layers.0 (Linear)"; "" outside of modules. An
            input has the module of an operator that reads it.
        line: your line that called it, or a reason why there is none. An input has the line of the same reader.
        dtype: the dtype in which the value was computed.
        shape: its sizes.
        min, max, mean: of its finite elements, in float64; None if there are none. Of complex numbers, of their
            absolute values.
        std: the standard deviation of its finite elements, as a population.
        nan: the number of elements that are NaN.
        inf: the number of elements that are infinite.
        begins: "nan" if it has NaN and no value has that it was computed from, "inf" the same of infinite elements; ""
            otherwise, or if the program wrote the infinity as a constant.
        fused: of such a value, the operators whose values were not seen between it and those that it was computed from:
            they ran with it as one, and it may begin in one of them.
    """

    step: int
    graph: int
    role: str
    index: int
    node: str
    overload: str
    module: str
    line: str
    dtype: str
    shape: tuple[int, ...]
    min: float | None
    max: float | None
    mean: float | None
    std: float | None
    nan: int
    inf: int
    begins: Literal["", "nan", "inf"] = ""
    fused: tuple[str, ...] = ()

    def __str__(self) -> str:
        place = f" of {self.module}" if self.module else ""
        counts = f"{self.nan} NaN, {self.inf} infinite"
        line = f"\n  {self.line}" if self.line else ""
        fused = f", or of one that ran with it: {', '.join(self.fused)}" if self.fused else ""
        return f"{self.node} = {self.overload}{place} (step {self.step}, {self.role}): {counts}{fused}{line}"


def short(number: float | None) -> str:
    """Spell a number for a table; nothing for None."""
    return "" if number is None else f"{number:.4g}"


def sizes(shape: Iterable[int]) -> str:
    """Spell a shape for a table: "4x8"."""
    return "x".join(map(str, shape)) or "()"


def lined_up(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Give the lines of a table, its columns as wide as they must be."""
    table = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
