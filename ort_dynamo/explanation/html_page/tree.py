"""Draws a graph as modules that fold into boxes, with their operators inside."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from ort_dynamo.explanation.data import PLACES, Operator, Role
from ort_dynamo.explanation.html_page.elements import Html, bar, code, element
from ort_dynamo.explanation.text import WORDS
from ort_dynamo.explanation.units import shortened, spelled_bytes, spelled_seconds
from ort_dynamo.report.node_counts import spoken

__all__ = ["module_tree"]


@dataclass
class _Box:
    """A module with its operators and the modules inside it, in the order in which they run."""

    name: str
    kind: str = ""
    operators: list[Operator] = field(default_factory=list)
    children: dict[str, _Box] = field(default_factory=dict)

    def every(self) -> list[Operator]:
        return [*self.operators, *(one for child in self.children.values() for one in child.every())]


def module_tree(role: Role) -> Html:
    """Draw the operators of a graph by module."""
    root = _Box("")
    for one in role.operators:
        box = root
        for name in one.module.split(".") if one.module else ():
            box = box.children.setdefault(name, _Box(name))
        box.kind = box.kind or one.kind
        box.operators.append(one)
    boxes = [_joined(child) for child in root.children.values()]
    outside = [_operators(root.operators)] if root.operators else []
    return element("div", *(_box_element(box, is_open=len(boxes) <= _FEW) for box in boxes), *outside, class_="tree")


def _joined(box: _Box) -> _Box:
    """Draw a module without operators of its own that has one module inside as one with it."""
    children = {name: _joined(child) for name, child in box.children.items()}
    if len(children) == 1 and not box.operators:
        (child,) = children.values()
        return _Box(f"{box.name}.{child.name}", child.kind, child.operators, child.children)
    return _Box(box.name, box.kind, box.operators, children)


_FEW = 4
"""Most boxes that are open from the start."""


def _box_element(box: _Box, *, is_open: bool = False) -> Html:
    every = box.every()
    counts = Counter(one.place for one in every)
    seconds = [one.seconds for one in every if one.seconds is not None]
    amount = spelled_seconds(sum(seconds)) if seconds else f"{len(every)} op{'s' if len(every) > 1 else ''}"
    kind = element("span", f" {box.kind}", class_="soft") if box.kind else ""
    parts = [(place, float(counts[place]), f"{counts[place]} {WORDS[place]}") for place in PLACES]
    said = ", ".join(title for _, count, title in parts if count)
    worst = next((f"has-{place}" for place in ("eager", "chosen") if counts[place]), None)
    return element(
        "details",
        element(
            "summary",
            element("span", code(box.name), kind, class_="name"),
            bar(parts, float(len(every)), label=said),
            element("span", amount, class_="n soft", title=said),
        ),
        *map(_box_element, box.children.values()),
        _operators(box.operators) if box.operators else "",
        class_=worst,
        open=is_open,
    )


def _operators(operators: list[Operator]) -> Html:
    return element("ul", *map(_operator, operators), class_="ops")


def _operator(one: Operator) -> Html:
    notes = [one.result, spelled_bytes(one.nbytes)] if one.nbytes else [one.result]
    if one.seconds is not None:
        notes.append(spelled_seconds(one.seconds))
    if one.recomputed:
        notes.append(f"recomputed by {one.recomputed}")
    if one.place not in ("native", "free"):
        notes.append(WORDS[one.place] + (f": {one.reason}" if one.reason else ""))
    if one.line.startswith("File "):
        notes.append(shortened(one.line))
    return element(
        "li",
        code(spoken(one.overload)),
        element("span", f" {' · '.join(filter(None, notes))}", class_="soft"),
        class_=f"t-{one.place}",
    )
