"""Draws the memory over a step, and bars of shares."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence

from ort_dynamo.explanation.groups import Moment, Share
from ort_dynamo.explanation.html_page.elements import Html, bar, code, element, join
from ort_dynamo.explanation.units import shortened, spelled_bytes
from ort_dynamo.report.node_counts import spoken

__all__ = ["memory_chart", "share_bars"]

_POINTS = 700
_HEIGHT = 220.0
_WIDTH = 1000.0


def memory_chart(moments: Sequence[Moment]) -> Html:
    """Draw the bytes alive at each operator of a step."""
    shown = _thinned(moments)
    most = max(one.alive for one in shown) or 1
    step = _WIDTH / len(shown)
    heights = [_HEIGHT - (_HEIGHT - 12) * one.alive / most for one in shown]
    points = " ".join(
        f"{step * index:.1f},{height:.1f} {step * (index + 1):.1f},{height:.1f}" for index, height in enumerate(heights)
    )
    grid = (
        element("line", x1=0, x2=_WIDTH, y1=f"{y:.1f}", y2=f"{y:.1f}", class_="grid")
        for y in (_HEIGHT - (_HEIGHT - 12) * part / 4 for part in range(1, 5))
    )
    at = max(range(len(shown)), key=lambda index: shown[index].alive)
    turn = next((index for index, one in enumerate(shown) if one.role == "backward"), None)
    drawing = element(
        "svg",
        *grid,
        element("polygon", points=f"0,{_HEIGHT:.0f} {points} {_WIDTH:.0f},{_HEIGHT:.0f}", class_="area"),
        element("polyline", points=points, class_="curve"),
        _upright(step * (at + 0.5), "peak"),
        "" if turn is None else _upright(step * turn, "half"),
        _upright(0, "cursor"),
        viewBox=f"0 0 {_WIDTH:.0f} {_HEIGHT:.0f}",
        preserveAspectRatio="none",
        role="img",
        aria_label=f"bytes alive over the step, at most {spelled_bytes(most)}",
    )
    peak = shown[at]
    read = f"Peak {spelled_bytes(peak.alive)} at {_described(peak)}. Move over the chart to read another operator."
    roles = [name for name, _ in itertools.groupby(one.role for one in shown)]
    return element(
        "div",
        element("div", element("span", spelled_bytes(most)), element("span", "bytes alive, predicted"), class_="ends"),
        element("div", drawing, class_="chart"),
        _strip(shown, lambda one: one.place, places=True),
        _strip(shown, lambda one: one.group, places=False),
        element("div", *(element("span", f"{name} →") for name in roles), class_="ends"),
        element("p", read, id="read", class_="read"),
        element(
            "script",
            _json([f"{spelled_bytes(one.alive)} at {_described(one)}" for one in shown]),
            type="application/json",
            id="memory",
        ),
        class_="panel",
    )


def _upright(x: float, kind: str) -> Html:
    return element("line", x1=f"{x:.1f}", x2=f"{x:.1f}", y1=0, y2=_HEIGHT, class_=kind)


def _described(one: Moment) -> str:
    module = f" of {one.module}" if one.module else ""
    return f"{spoken(one.overload)}{module} ({one.role}), {shortened(one.line)}"


def _json(texts: Sequence[str]) -> Html:
    return Html(json.dumps(texts).replace("<", "\\u003c").replace("&", "\\u0026"))


def _thinned(moments: Sequence[Moment]) -> list[Moment]:
    """Take the highest of neighbours where there are more than can be seen."""
    count = min(len(moments), _POINTS)
    edges = [round(index * len(moments) / count) for index in range(count + 1)]
    return [max(moments[a:b], key=lambda one: one.alive) for a, b in itertools.pairwise(edges)]


def _strip(shown: Sequence[Moment], key: Callable[[Moment], str], *, places: bool) -> Html:
    runs = [(name, len(list(every))) for name, every in itertools.groupby(shown, key)]
    parts = (
        element(
            "i",
            "" if places or count * 100 < len(shown) * 2 else name.rpartition(".")[2],
            class_=name if places else None,
            style=f"flex-grow:{count}",
            title=name or "outside of modules",
        )
        for name, count in runs
    )
    return element("div", *parts, class_="strip places" if places else "strip")


def share_bars(shares: Sequence[Share], spelled: Callable[[float], str], most: int = 10) -> Html:
    """Draw a bar for each share of a sum, and one for the rest."""
    total = sum(one.amount for one in shares) or 1.0
    largest = max((one.amount for one in shares), default=1.0) or 1.0
    shown = [_share(one, total, largest, spelled) for one in shares[:most]]
    if len(shares) > most:
        rest = shares[most:]
        amount = sum(one.amount for one in rest)
        count = sum(one.count for one in rest)
        shown.append(_share(Share(f"{len(rest)} others", amount, count), total, largest, spelled))
    return join(shown)


def _share(one: Share, total: float, largest: float, spelled: Callable[[float], str]) -> Html:
    line = next((line for line in one.lines if line.startswith("File ")), "")
    return element(
        "div",
        element("span", f"{one.count} x ", code(one.name)),
        element("span", f"{spelled(one.amount)}, {one.amount / total:.0%}", class_="n"),
        bar([("amount", one.amount, spelled(one.amount))], max(largest, one.amount), label=spelled(one.amount)),
        element("code", shortened(line), class_="line soft", title=shortened(line)) if line else "",
        class_="share",
    )
