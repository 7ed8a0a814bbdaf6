"""Results that show themselves on the Python prompt and in a notebook."""

from __future__ import annotations

import html

__all__ = ["ShownAsText"]


class ShownAsText:
    """A result that is shown as its text. A dataclass of this kind has repr=False."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        """Return the text as a notebook shows it."""
        return f"<pre>{html.escape(str(self))}</pre>"
