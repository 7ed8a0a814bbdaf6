"""The explanation of a function's graphs, as data, as text and as a page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ort_dynamo.explanation.data import Call, Graph, Measured, plain
from ort_dynamo.explanation.groups import Group, Share, outside, saved_by, step, time_by
from ort_dynamo.explanation.text import lines
from ort_dynamo.report.summary import Summary

__all__ = ["Explanation"]


@dataclass(frozen=True, repr=False)
class Explanation:
    """The graphs of a function and where they run; its str and repr are a screen of text.

    Attributes:
        name: the class of the module, the function's name, or the program's file.
        graphs: its graphs, one for each of Dynamo's, with forward and backward.
        summary: where operators run, graph breaks, skipped functions and recompiles, as `summary()` tells them. Its
            recompiles include the earlier ones of the same functions in this process.
        runtime: package, version and provider of ONNX Runtime.
        options: the options that were given, as text.
        measured: times and bytes of some steps; None without measure=True.
        cache: the folder of the cache on disk; "" if it is off.
        calls: the calls of graphs in one step, in order. A graph may run several times, such as once for each layer. Of
            a program with several steps, it is the one that saves most.
    """

    name: str
    graphs: tuple[Graph, ...]
    summary: Summary
    runtime: str
    options: Mapping[str, str] = field(default_factory=dict)
    measured: Measured | None = None
    cache: str = ""
    calls: tuple[Call, ...] = ()

    @property
    def outside(self) -> tuple[Group, ...]:
        """The operators that torch runs, grouped by reason: fallbacks first, then by choice, then by design."""
        return outside(role for graph in self.graphs for role in graph.roles)

    @property
    def saved(self) -> tuple[Share, ...]:
        """Bytes that the calls of a step save for the backward, by operator and module class, most first.

        A tensor that two graphs save is part of both. It counts once in `saved_bytes`.
        """
        return saved_by(self.in_step)

    @property
    def saved_bytes(self) -> int:
        """Bytes that a step saves for the backward."""
        return sum(one.saved for one in self.calls)

    @property
    def in_step(self) -> tuple[Graph, ...]:
        """The graph of each call in a step."""
        return tuple(self.graphs[one.graph] for one in self.calls)

    @property
    def times(self) -> tuple[Share, ...]:
        """Measured seconds by operator, most first; empty without measure=True."""
        return time_by(self.graphs)

    @property
    def peak(self) -> int:
        """Predicted most bytes alive in a step, inputs and parameters not counted."""
        return max((one.alive for one in step(self.graphs, self.calls)), default=0)

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as dicts, lists, texts and numbers, as JSON has them."""
        found: dict[str, Any] = plain(self)
        return found

    def save(self, path: str | Path) -> Path:
        """Write the page, one HTML file that needs no other, and return its path."""
        from ort_dynamo.explanation.html_page.page import page

        written = Path(path)
        written.write_text(page(self), encoding="utf-8")
        return written

    def __str__(self) -> str:
        return "\n".join(lines(self))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Return the page as a notebook shows it."""
        from ort_dynamo.explanation.html_page.page import embedded

        return embedded(self)
