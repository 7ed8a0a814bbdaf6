"""Writes the page: one look at the top, then what is not in ONNX Runtime, memory, time, graphs, passes and sessions."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from ort_dynamo.explanation.data import PLACES
from ort_dynamo.explanation.groups import By, Share, saved_by, step, time_by
from ort_dynamo.explanation.html_page.charts import memory_chart, share_bars
from ort_dynamo.explanation.html_page.elements import Html, bar, code, element, join
from ort_dynamo.explanation.html_page.style import SCRIPT, STYLE
from ort_dynamo.explanation.html_page.tables import (
    compile_stages,
    graph_notes,
    outside_cards,
    pass_table,
    recompute_table,
    session_table,
)
from ort_dynamo.explanation.html_page.tree import module_tree
from ort_dynamo.explanation.text import WORDS, islands, places
from ort_dynamo.explanation.units import shortened, spelled_bytes, spelled_seconds

if TYPE_CHECKING:
    from ort_dynamo.explanation.explanation import Explanation

__all__ = ["embedded", "page"]


def page(explanation: Explanation) -> str:
    """Write the page, which needs nothing from elsewhere."""
    title = explanation.name
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", f"{title}: ort_dynamo.explain"),
        element("style", Html(STYLE)),
    )
    body = element("body", *_body(explanation, title), element("script", Html(SCRIPT)))
    return f"<!DOCTYPE html>\n{element('html', head, body, lang='en')}\n"


def embedded(explanation: Explanation) -> str:
    """Write the page in a frame, so that its style is its own in a notebook."""
    frame = "width:100%;height:640px;border:0"
    return f'<iframe srcdoc="{html.escape(page(explanation))}" style="{frame}"></iframe>'


def _body(explanation: Explanation, title: str) -> Iterator[Html]:
    yield element("h1", title)
    given = ", ".join(f"{name}={value}" for name, value in explanation.options.items())
    yield element("p", f"{explanation.runtime}{f', with {given}' if given else ''}", class_="soft")
    if not explanation.graphs:
        yield element("p", "Nothing was compiled by ort_train.")
        return
    yield element("div", *_tiles(explanation), class_="tiles")
    yield element("p", *(element("span", WORDS[place], class_=f"t-{place}") for place in PLACES), class_="key")
    yield element("h2", "Not in ONNX Runtime")
    yield outside_cards(explanation.outside)
    notes = graph_notes(explanation.summary)
    if notes:
        yield element("h2", "Graph breaks and recompiles")
        yield notes
    yield element("h2", "Memory over the step")
    if moments := step(explanation.graphs, explanation.calls):
        yield memory_chart(moments)
    yield from _memory(explanation)
    yield from _time(explanation)
    yield element("h2", "Graphs, by module")
    yield element(
        "p",
        element(
            "input", id="find", type="search", placeholder="Find an operator, a module or a line", aria_label="Find"
        ),
    )
    yield from _graphs(explanation)
    yield element("h2", "Passes")
    yield pass_table(explanation.graphs)
    yield element("h2", "Sessions and cache")
    yield element("p", f"Cache on disk: {explanation.cache or 'off'}", class_="soft")
    yield session_table(explanation.graphs)
    yield element("h2", "Time of the compile")
    yield compile_stages(explanation.graphs)


def _tiles(explanation: Explanation) -> Iterator[Html]:
    graphs, summary = explanation.graphs, explanation.summary
    every = [one.place for graph in graphs for role in graph.roles for one in role.operators]
    counts = Counter(every)
    computing = len(every) - counts["free"]
    parts = [(place, float(counts[place]), f"{counts[place]} {WORDS[place]}") for place in PLACES if place != "free"]
    rest = ", ".join(f"{counts[place]} {word}" for place, word in _SHORT.items() if counts[place]) or "none elsewhere"
    yield _tile(
        "Operators in ONNX Runtime",
        f"{counts['native']} of {computing}",
        bar(parts, float(computing), label=rest),
        element("span", rest, class_="soft"),
        kind="bad" if counts["eager"] else "note" if counts["chosen"] else "",
    )
    breaks, again = len(summary.breaks), len(summary.recompiles)
    yield _tile(
        "Graphs",
        str(len(graphs)),
        element("span", f"{_count(breaks, 'graph break')}, {_count(again, 'recompile')}", class_="soft"),
        kind="note" if breaks or summary.skipped else "",
    )
    measured = explanation.measured
    told = (
        f"predicted; measured {spelled_bytes(measured.peak)} in {measured.peak_of}"
        if measured and measured.peak
        else "predicted"
    )
    yield _tile("Peak memory", spelled_bytes(explanation.peak), element("span", told, class_="soft"))
    saved = explanation.saved_bytes
    again = sum(sum(graph.recomputed.values()) for graph in explanation.in_step)
    yield _tile(
        "Saved for the backward", spelled_bytes(saved), element("span", f"{again} operators recomputed", class_="soft")
    )
    if measured is not None:
        inside = measured.sessions / measured.step if measured.step else 0.0
        yield _tile(
            "A step",
            spelled_seconds(measured.step),
            bar([("native", inside, "in sessions"), ("free", 1 - inside, "elsewhere")], 1.0, label="in sessions"),
            element("span", f"{inside:.0%} in sessions", class_="soft"),
        )
    seconds = sum(sum(graph.stages.values()) for graph in graphs)
    yield _tile("The compile", spelled_seconds(seconds), element("span", islands_of(explanation), class_="soft"))


_SHORT = {"eager": "in eager (fallback)", "chosen": "by torch's choice", "by_design": "by design"}
"""Place -> its words in a tile."""


def _tile(name: str, figure: str, *more: Html, kind: str = "") -> Html:
    return element(
        "div", element("span", name, class_="soft"), element("b", figure), *more, class_=f"tile {kind}".strip()
    )


def _count(number: int, name: str) -> str:
    return f"{number} {name}{'' if number == 1 else 's'}"


def islands_of(explanation: Explanation) -> str:
    """Say how many sessions there are, and how many a cache had."""
    sources = [one.source for graph in explanation.graphs for role in graph.roles for one in role.islands]
    found = sum(one != "built" for one in sources)
    return f"{_count(len(sources), 'session')}, {found} from a cache"


def _memory(explanation: Explanation) -> Iterator[Html]:
    graphs, saved = explanation.graphs, explanation.saved
    columns = []
    if saved:
        columns.append(_shares("Saved for the backward, by operator", saved, spelled_bytes))
        columns.append(
            _shares("Saved for the backward, by module", saved_by(explanation.in_step, "module"), spelled_bytes)
        )
    if any(graph.recomputed for graph in graphs):
        inside = (element("h3", "Recomputed in the backward"), recompute_table(graphs))
        columns.append(element("div", *inside, class_="panel"))
    if columns:
        yield element("div", *columns, class_="two")


def _shares(title: str, shares: Sequence[Share], spelled: Callable[[float], str]) -> Html:
    return element("div", element("h3", title), share_bars(shares, spelled), class_="panel")


def _time(explanation: Explanation) -> Iterator[Html]:
    measured = explanation.measured
    yield element("h2", "Time over the step")
    if measured is None:
        yield element("p", "It was not measured. ", code("explain(..., measure=True)"), " measures it.", class_="soft")
        return
    total = measured.step or 1.0
    backward = f", backward {spelled_seconds(measured.backward)}" if measured.backward is not None else ""
    sessions = [
        (f"{role.name} {one.name}", one.measured or 0.0)
        for graph in explanation.graphs
        for role in graph.roles
        for one in role.islands
    ]
    parts = [("native", seconds, f"{name}: {spelled_seconds(seconds)}") for name, seconds in sessions]
    rest = max(total - sum(seconds for _, seconds in sessions), 0.0)
    said = f"outside of sessions: {spelled_seconds(rest)}"
    yield element(
        "div",
        element("p", f"Forward {spelled_seconds(measured.forward)}{backward}; median of {measured.steps} steps."),
        bar([*parts, ("free", rest, said)], total, label=said),
        element("p", f"In sessions: {spelled_seconds(measured.sessions)}; {said}.", class_="soft"),
        class_="panel",
    )
    if explanation.times:
        columns = (_shares(title, time_by(explanation.graphs, by), spelled_seconds) for by, title in _BY.items())
        yield element("div", *columns, class_="two")


_BY: dict[By, str] = {"operator": "By operator", "class": "By class of module", "module": "By module"}


def _graphs(explanation: Explanation) -> Iterator[Html]:
    several = len(explanation.graphs) > 1
    for graph in explanation.graphs:
        roles = element(
            "div",
            *(
                element(
                    "div",
                    element("h3", role.name),
                    element("p", f"{places(role)}; {islands(role)}; peak {spelled_bytes(role.peak)}", class_="soft"),
                    _casts(role.casts),
                    module_tree(role),
                    class_="panel",
                )
                for role in graph.roles
            ),
            class_="two",
        )
        if several:
            count = sum(len(role.operators) for role in graph.roles)
            title = f"{shortened(graph.function)} ({count} operators)"
            yield element("details", element("summary", title, class_="plain"), roles, open=True)
        else:
            yield roles


def _casts(casts: object) -> Html:
    assert isinstance(casts, dict)
    said = ", ".join(f"{count} x {name}" for name, count in casts.items())
    return element("p", f"casts: {said}", class_="soft") if said else join(())
