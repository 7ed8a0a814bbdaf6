"""Statistics of a run: rows, a table, the first NaN, and files."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from ort_dynamo.errors import InvalidArgumentError
from ort_dynamo.notebook import ShownAsText
from ort_dynamo.statistics.values import ValueStatistics, lined_up, short, sizes

__all__ = ["RunStatistics", "load_statistics"]

_MOST = 200
"""Rows that a printed table has."""

_NAMES = tuple(field.name for field in fields(ValueStatistics))


class RunStatistics(ShownAsText):
    """The statistics of the values that compiled graphs computed.

    Printed, it is a table with a row for each value.

    Attributes:
        statistics: a row for each value and run of a graph, in the order in which they were computed.

    Args:
        statistics: the rows.
    """

    def __init__(self, statistics: Iterable[ValueStatistics] = ()) -> None:
        self.statistics: list[ValueStatistics] = list(statistics)
        self._why_empty = "No graph of ort_train ran."

    def first_nan(self, *, infinities: bool = True) -> ValueStatistics | None:
        """Return the first value that has NaN or infinite elements although those that it was computed from have none.

        An infinity that the program wrote as a constant, such as that of an attention mask, does not count. An input of
        a graph counts if it has NaN, and the gradient that a backward begins with also if it is infinite.

        Args:
            infinities: False looks for NaN alone.
        """
        wanted = ("nan", "inf") if infinities else ("nan",)
        return next((one for one in self.statistics if one.begins in wanted), None)

    def save(self, path: str | Path) -> None:
        """Write the rows to a file, which `load_statistics` and pandas read.

        Args:
            path: a file that ends in .json (a list of objects) or .csv. One that is there is replaced.

        Raises:
            InvalidArgumentError: it ends otherwise.
            OSError: it cannot be written.
        """
        path = Path(path)
        rows = [asdict(one) for one in self.statistics]
        if _suffix("save", path) == ".json":
            path.write_text(json.dumps(rows, indent=1, allow_nan=False), encoding="utf-8")
            return
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, _NAMES)
            writer.writeheader()
            writer.writerows(
                {**row, "shape": "x".join(map(str, row["shape"])), "fused": " ".join(row["fused"])} for row in rows
            )

    def __str__(self) -> str:
        shown = self.statistics[:_MOST]
        graphs = len({one.graph for one in self.statistics})
        lines = [f"{len(self.statistics)} values, {graphs} graphs, {len({one.step for one in self.statistics})} steps"]
        if not shown:
            return f"{lines[0]}\n{self._why_empty}"
        head = ["step", "graph", "node", "operator", "module", "dtype", "shape"]
        head += ["min", "max", "mean", "std", "NaN", "inf"]
        lines += lined_up(head, map(_row, shown))
        if left := len(self.statistics) - len(shown):
            lines.append(f"… and {left} more; save() writes all")
        if (first := self.first_nan()) is not None:
            lines.append(f"first NaN or infinity: {first}")
        return "\n".join(lines)


def _row(one: ValueStatistics) -> list[str]:
    numbers = [*map(short, (one.min, one.max, one.mean, one.std)), str(one.nan), str(one.inf)]
    graph = f"{one.graph} {one.role}"
    return [str(one.step), graph, one.node, one.overload, one.module, one.dtype, sizes(one.shape), *numbers]


def load_statistics(path: str | Path) -> RunStatistics:
    """Read the statistics of a run from a file that `RunStatistics.save` wrote.

    Raises:
        InvalidArgumentError: the file is no such file.
        OSError: it cannot be read.
    """
    path = Path(path)
    suffix = _suffix("load_statistics", path)
    try:
        return RunStatistics(_rows(path, suffix))
    except (ValueError, TypeError, KeyError, csv.Error) as error:
        raise InvalidArgumentError(
            function="load_statistics", name="path", value=str(path), expected=f"a file that save() wrote ({error})"
        ) from error


def _suffix(function: str, path: Path) -> str:
    if path.suffix not in (".json", ".csv"):
        raise InvalidArgumentError(
            function=function, name="path", value=str(path), expected="a name that ends in .json or .csv"
        )
    return path.suffix


def _rows(path: Path, suffix: str) -> Iterator[ValueStatistics]:
    if suffix == ".json":
        rows = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(rows, list):
            raise ValueError("it is no list")
        for row in rows:
            yield ValueStatistics(
                **{**{name: row[name] for name in _NAMES}, "shape": tuple(row["shape"]), "fused": tuple(row["fused"])}
            )
        return
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        if missing := [name for name in _NAMES if name not in (reader.fieldnames or ())]:
            raise ValueError(f"it has no column {missing[0]}")
        for row in reader:
            if None in row.values():
                raise ValueError("a row has too few columns")
            yield _read(row)


def _read(row: Mapping[str, str]) -> ValueStatistics:
    found: dict[str, Any] = {name: row[name] for name in _NAMES}
    found |= {name: int(row[name]) for name in ("step", "graph", "index", "nan", "inf")}
    found |= {name: float(row[name]) if row[name] else None for name in ("min", "max", "mean", "std")}
    found["shape"] = tuple(map(int, row["shape"].split("x"))) if row["shape"] else ()
    found["fused"] = tuple(row["fused"].split())
    return ValueStatistics(**found)
