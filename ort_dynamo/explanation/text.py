"""Writes an explanation as one screen of text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ort_dynamo.explanation.data import Graph, Measured, Role
from ort_dynamo.explanation.groups import ORDER, Group, Share, stage_times
from ort_dynamo.explanation.units import shortened, spelled_bytes, spelled_seconds
from ort_dynamo.report.by_module import module_lines
from ort_dynamo.report.node_counts import BY_CHOICE, BY_DESIGN, FALLBACK, section, spoken
from ort_dynamo.report.notes import grouped, repeated

if TYPE_CHECKING:
    from ort_dynamo.explanation.explanation import Explanation

__all__ = ["WORDS", "lines"]

WORDS = {
    "native": "in ONNX Runtime",
    "chosen": BY_CHOICE,
    "eager": FALLBACK,
    "by_design": BY_DESIGN,
    "free": "views and sizes",
}
"""Place -> its words."""

_WIDTH = 100
_MOST = 60
_FEW = 4
_NAMES = 3


def lines(explanation: Explanation) -> list[str]:
    """Give the lines of an explanation: at most 60, of at most 100 columns."""
    found = [part for text in _lines(explanation) for line in text.splitlines() for part in _wrapped(shortened(line))]
    if len(found) > _MOST:
        more = f"and {len(found) - _MOST + 1} more lines: the attributes have all, and save() writes a page"
        return [*found[: _MOST - 1], more]
    return found


def _wrapped(line: str) -> list[str]:
    """Split a long line in two, and cut the rest."""
    indent = line[: len(line) - len(line.lstrip())]
    return textwrap.wrap(
        line,
        _WIDTH,
        initial_indent="",
        subsequent_indent=f"{indent}  ",
        max_lines=2,
        placeholder=" …",
        break_on_hyphens=False,
        drop_whitespace=True,
    ) or [""]


def _lines(explanation: Explanation) -> Iterator[str]:
    graphs, summary = explanation.graphs, explanation.summary
    if not graphs:
        yield f"{explanation.name}: nothing was compiled by ort_train"
    else:
        given = ", ".join(f"{name}={value}" for name, value in explanation.options.items())
        yield f"{explanation.name} with ort_train on {explanation.runtime}{f', with {given}' if given else ''}"
        breaks = len(summary.breaks)
        yield f"graphs: {len(graphs)}, graph breaks: {breaks}, recompiles: {len(summary.recompiles)}"
    for graph in graphs[:_FEW]:
        yield from _graph(graph, len(graphs) > 1)
    if len(graphs) > _FEW:
        yield f"and {len(graphs) - _FEW} more graphs"
    yield from module_lines(summary.modules, 6)
    yield from _outside(explanation.outside)
    yield from section("graph breaks", grouped(summary.breaks))
    yield from section("skipped by Dynamo, their own code runs in eager", grouped(summary.skipped))
    yield from section("compiled again", repeated(summary.recompiles))
    yield from _memory(explanation)
    yield from _passes(graphs)
    if graphs:
        yield f"compile: {_stages(graphs)}"
    if explanation.measured is not None:
        yield from _measured(explanation.measured, explanation.times)


def _graph(graph: Graph, named: bool) -> Iterator[str]:
    if named:
        yield f"{graph.function}:"
    for role in graph.roles:
        yield f"{'  ' if named else ''}{role.name}: {places(role)}; {islands(role)}"


def places(role: Role) -> str:
    """Say how many operators of a graph run where."""
    counts = ((role.count(place), word) for place, word in WORDS.items() if place != "free")
    said = [f"{count} {word}" for index, (count, word) in enumerate(counts) if count or not index]
    return ", ".join(said)


def islands(role: Role) -> str:
    """Say how many sessions a graph has, and where they come from."""
    count = len(role.islands)
    if not count:
        return "no session"
    sources = dict.fromkeys(source(one.source, one.miss) for one in role.islands)
    return f"{count} session{'s' if count > 1 else ''}, {' and '.join(sources)}"


def source(found: str, miss: str) -> str:
    """Say where an island comes from."""
    return f"built (cache: {miss})" if found == "built" else _SOURCES[found]


_SOURCES = {"memory": "from this process", "disk": "from the cache on disk"}


def _outside(groups: Sequence[Group]) -> Iterator[str]:
    for place in ORDER:
        mine = [one for one in groups if one.place == place]
        if not mine:
            continue
        yield f"{WORDS[place]}:"
        reasons: dict[str, list[Group]] = {}
        for one in mine:
            reasons.setdefault(one.reason, []).append(one)
        for reason, same in list(reasons.items())[:_FEW]:
            yield f"  {_named(same)}{f': {reason}' if reason else ''}"
            if place == "eager":
                lines = dict.fromkeys(line for one in same for line in one.lines)
                yield from (f"    {line}" for line in list(lines)[:_FEW])
        if len(reasons) > _FEW:
            yield f"  and for {len(reasons) - _FEW} other reasons"
        yield from (f"  change it with {one}" for one in dict.fromkeys(one.change for one in mine if one.change))


def _named(groups: Sequence[Group]) -> str:
    """Name the operators of some groups: "3 x aten.sin.default, aten.cos.default (forward, backward)"."""
    names = list(dict.fromkeys(spoken(one.overload) for one in groups))
    more = f" and {len(names) - _NAMES} others" if len(names) > _NAMES + 1 else ""
    roles = ", ".join(dict.fromkeys(one.role for one in groups))
    return f"{sum(one.count for one in groups)} x {', '.join(names[:_NAMES] if more else names)}{more} ({roles})"


def _memory(explanation: Explanation) -> Iterator[str]:
    graphs, saved = explanation.in_step, explanation.saved
    if not graphs:
        return
    without = sum(graph.nbytes_without for graph in graphs)
    again = sum(sum(graph.recomputed.values()) for graph in graphs)
    kept = f", {spelled_bytes(explanation.saved_bytes)} saved for the backward" if without else ""
    operators = f"{again} operator{'s' if again > 1 else ''}"
    plan = f" ({spelled_bytes(without)} without recomputation of {operators})" if again else ""
    calls = f" in a step with {len(graphs)} calls of graphs" if len(set(map(id, graphs))) < len(graphs) else ""
    yield f"memory{calls}: predicted peak {spelled_bytes(explanation.peak)}{kept}{plan}"
    for one in saved[:_FEW]:
        yield f"  {spelled_bytes(one.amount)} in {one.count} tensor{'s' if one.count > 1 else ''} of {one.name}"
        yield from (f"    {line}" for line in one.lines[:1] if line.startswith("File "))
    if len(saved) > _FEW:
        rest = saved[_FEW:]
        yield f"  {spelled_bytes(sum(one.amount for one in rest))} of {len(rest)} more"


def _passes(graphs: Sequence[Graph]) -> Iterator[str]:
    runs = [run for graph in graphs for run in graph.pass_runs]
    changed = dict.fromkeys(run.name for run in runs if run.modified)
    if not runs:
        return
    text = f"passes: {sum(run.modified for run in runs)} of {len(runs)} runs changed a graph: {', '.join(changed)}"
    yield text
    casts: dict[str, int] = {}
    for graph in graphs:
        for role in graph.roles:
            for name, count in role.casts.items():
                casts[name] = casts.get(name, 0) + count
    if casts:
        yield f"casts: {', '.join(f'{count} x {name}' for name, count in casts.items())}"


def _stages(graphs: Sequence[Graph]) -> str:
    found = stage_times(graphs)
    parts = ", ".join(f"{name} {spelled_seconds(seconds)}" for name, seconds in found.items() if seconds >= 1e-3)
    return f"{spelled_seconds(sum(found.values()))} ({parts})"


def _measured(measured: Measured, times: Sequence[Share]) -> Iterator[str]:
    backward = f" + backward {spelled_seconds(measured.backward)}" if measured.backward is not None else ""
    inside = measured.sessions / measured.step if measured.step else 0.0
    yield (
        f"measured, {measured.steps} steps: forward {spelled_seconds(measured.forward)}{backward}, "
        f"{inside:.0%} in sessions"
    )
    if measured.peak is not None:
        yield f"  peak {spelled_bytes(measured.peak)} in {measured.peak_of}"
    for one in times[:_FEW]:
        yield f"  {spelled_seconds(one.amount)} in {one.count} x {one.name}"
