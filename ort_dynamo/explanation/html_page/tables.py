"""Draws the tables of the page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ort_dynamo.explanation.data import Graph, PassRun
from ort_dynamo.explanation.groups import Group, stage_times
from ort_dynamo.explanation.html_page.elements import Html, bar, code, element, join, table
from ort_dynamo.explanation.text import WORDS, source
from ort_dynamo.explanation.units import shortened, spelled_bytes, spelled_seconds
from ort_dynamo.report.node_counts import spoken
from ort_dynamo.report.summary import Summary

__all__ = ["compile_stages", "graph_notes", "outside_cards", "pass_table", "recompute_table", "session_table"]

_LINES = 3
_NAMES = 12


def outside_cards(groups: Sequence[Group]) -> Html:
    """List the operators that torch runs, a card for each reason."""
    if not groups:
        return element("p", "Nothing: ONNX Runtime runs all operators.")
    reasons: dict[tuple[str, str, str], list[Group]] = {}
    for one in groups:
        reasons.setdefault((one.place, one.reason, one.change), []).append(one)
    return join(_card(place, reason, change, same) for (place, reason, change), same in reasons.items())


def _card(place: str, reason: str, change: str, groups: Sequence[Group]) -> Html:
    operators: dict[str, int] = {}
    for one in groups:
        operators[spoken(one.overload)] = operators.get(spoken(one.overload), 0) + one.count
    names = [(element("span", f"{count} x ", code(name), class_="flow")) for name, count in operators.items()]
    change_it = element("p", "Change it with ", code(change), class_="soft") if change else ""
    roles = ", ".join(dict.fromkeys(one.role for one in groups))
    return element(
        "div",
        element(
            "p",
            element("b", f"{sum(operators.values())} ", class_="count"),
            element("span", WORDS[place], class_=f"place t-{place}"),
            f": {reason or 'torch runs random numbers and communication'}",
            element("span", f" ({roles})", class_="soft"),
        ),
        element(
            "p", *names[:_NAMES], f"and {len(names) - _NAMES} others" if len(names) > _NAMES else "", class_="names"
        ),
        _lines([line for one in groups for line in one.lines], [name for one in groups for name in one.modules]),
        change_it,
        class_=f"panel card c-{place}",
    )


def _lines(lines: Sequence[str], modules: Sequence[str]) -> Html:
    known = [code(shortened(line)) for line in dict.fromkeys(lines) if line.startswith("File ")]
    names = list(dict.fromkeys(modules))
    more = f" and {len(names) - _LINES} more" if len(names) > _LINES else ""
    said = element("div", f"in {', '.join(names[:_LINES])}{more}", class_="soft") if names else ""
    rest = element("div", f"and {len(known) - _LINES} more", class_="soft") if len(known) > _LINES else ""
    return join((*(element("div", one) for one in known[:_LINES]), rest, said))


def graph_notes(summary: Summary) -> Html | None:
    """List graph breaks, skipped functions and recompiles; None if there are none."""
    found = [
        element(
            "p",
            element("b", f"{kind} "),
            code(shortened(one.name)),
            element("br"),
            shortened(one.reason),
            class_="panel",
        )
        for kind, notes in (
            ("graph break", summary.breaks),
            ("skipped, runs in eager", summary.skipped),
            ("recompile", summary.recompiles),
            ("recompile limit", summary.limited),
        )
        for one in notes
    ]
    return join(found) if found else None


def recompute_table(graphs: Sequence[Graph]) -> Html:
    """List the operators that the backward recomputes."""
    rows = [(count, code(name)) for graph in graphs for name, count in graph.recomputed.items()]
    said = "; ".join(
        f"{spelled_bytes(graph.saved_bytes)} are saved instead of {spelled_bytes(graph.nbytes_without)}, "
        f"for {graph.recompute_time:.1%} of the forward's time (estimated)"
        for graph in graphs
        if graph.recomputed
    )
    return join((element("p", said, class_="soft"), table(("", "decided by: operator"), rows, numbers=(0,))))


def pass_table(graphs: Sequence[Graph]) -> Html:
    """List the passes that changed a graph with its nodes before and after, then the others, folded."""
    runs = [run for graph in graphs for run in graph.pass_runs]
    changed = [run for run in runs if run.modified]
    most = max((max(run.before, run.after) for run in changed), default=1) or 1
    rows = [
        (
            join((code(run.name), *(element("div", said, class_="soft") for said in _changes(run)))),
            run.on,
            _before_after(run, most),
            f"{run.after - run.before:+d}",
            spelled_seconds(run.seconds),
        )
        for run in changed
    ]
    same = dict.fromkeys(run.name for run in runs if not run.modified)
    shown = table(("pass", "on", "nodes before and after", "change", "time"), rows, numbers=(3, 4))
    folded = element(
        "details",
        element("summary", f"{len(runs) - len(changed)} runs of passes changed nothing", class_="plain"),
        element("p", ", ".join(same), class_="soft"),
    )
    return join((shown, folded))


def _changes(run: PassRun) -> Iterator[str]:
    """Give the pass's account of its changes, and the operators of which it made more or fewer nodes."""
    if run.summary:
        yield shortened(run.summary)
    if run.operators:
        yield ", ".join(f"{operator} {before} → {after}" for operator, before, after in run.operators)


def _before_after(run: PassRun, most: int) -> Html:
    bars = [
        element(
            "div",
            bar([("free" if index else "amount", float(count), f"{count} nodes")], float(most), label=f"{count} nodes"),
        )
        for index, count in enumerate((run.before, run.after))
    ]
    return join((element("span", f"{run.before} → {run.after}", class_="soft"), *bars))


def session_table(graphs: Sequence[Graph]) -> Html:
    """List the islands with their sessions."""
    rows = [
        (
            join((f"{role.name} {one.name}", element("div", one.covers, class_="soft"))),
            one.operators,
            sum(one.onnx_nodes.values()),
            ", ".join(f"{count} {name}" for name, count in list(one.onnx_nodes.items())[:4]),
            ", ".join(f"{count} to {name}" for name, count in one.casts.items()),
            join((source(one.source, one.miss), element("div", code(one.key), class_="soft"))),
            spelled_bytes(one.nbytes),
            spelled_seconds(one.seconds),
            "" if one.measured is None else spelled_seconds(one.measured),
        )
        for graph in graphs
        for role in graph.roles
        for one in role.islands
    ]
    if not rows:
        return element("p", "There is no session: torch runs all operators.")
    heads = ("island", "operators", "ONNX nodes", "most of them", "casts", "from", "model", "to open", "a run")
    return table(heads, rows, numbers=(1, 2, 6, 7, 8))


def compile_stages(graphs: Sequence[Graph]) -> Html:
    """Draw the time of each stage of the compile."""
    found = stage_times(graphs)
    most = max(found.values(), default=1.0) or 1.0
    rows = [
        (name, bar([("amount", seconds, spelled_seconds(seconds))], most, label=name), spelled_seconds(seconds))
        for name, seconds in found.items()
    ]
    return table(("stage", "", "time"), rows, numbers=(2,))
