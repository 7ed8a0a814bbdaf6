"""Makes HTML elements; text is escaped unless it is HTML of ours."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["Html", "bar", "code", "element", "join", "table"]

_EMPTY = frozenset({"input", "meta", "br"})
"""Elements that have no content and no end."""


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def element(name: str, /, *content: object, **attributes: Any) -> Html:
    """Make an element.

    Args:
        name: its name.
        content: text, which is escaped, and HTML.
        attributes: its attributes; of a name, "_" stands for "-", and a last one is dropped. True stands for an
            attribute without a value, and one that is None or False is left out.
    """
    given = "".join(
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{html.escape(str(value))}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if name in _EMPTY:
        return Html(f"<{name}{given}>")
    return Html(f"<{name}{given}>{join(content)}</{name}>")


def join(content: Iterable[object]) -> Html:
    """Join text and HTML, and escape the text."""
    return Html("".join(one if isinstance(one, Html) else html.escape(str(one), quote=False) for one in content))


def code(text: object) -> Html:
    """Make an element of code."""
    return element("code", text)


def table(heads: Sequence[str], rows: Iterable[Sequence[object]], numbers: Sequence[int] = ()) -> Html:
    """Make a table that scrolls sideways where it is too wide.

    Args:
        heads: the names of its columns.
        rows: the cells.
        numbers: indices of columns of numbers.
    """
    kinds = ["n" if index in numbers else None for index in range(len(heads))]
    head = element("tr", *(element("th", name, class_=kind) for name, kind in zip(heads, kinds, strict=True)))
    body = (
        element("tr", *(element("td", cell, class_=kind) for cell, kind in zip(row, kinds, strict=True)))
        for row in rows
    )
    inner = element("table", element("thead", head), element("tbody", *body))
    return element("div", inner, class_="wide")


def bar(parts: Iterable[tuple[str, float, str]], total: float, *, label: str = "") -> Html:
    """Make a bar of several parts.

    Args:
        parts: (class, amount, title) of each.
        total: the amount of a full bar.
        label: of the whole, for those who cannot see it.
    """
    shown = (
        element("i", class_=kind, style=f"width:{100 * amount / total:.2f}%", title=title)
        for kind, amount, title in parts
        if amount and total
    )
    return element("span", *shown, class_="bar", role="img", aria_label=label or None)
