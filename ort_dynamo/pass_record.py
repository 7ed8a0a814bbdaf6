"""What became of one run of a pass."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PassRecord"]


@dataclass(frozen=True)
class PassRecord:
    """One run of one pass.

    Attributes:
        name: the pass, with its parameters: its repr, or the class's name where that is not ours.
        seconds: how long it took, checks not counted.
        modified: whether it changed the graph.
        summary: what the pass says of what it did (CastSummary of PropagateCasts); None for most.
    """

    name: str
    seconds: float
    modified: bool
    summary: object | None = None
