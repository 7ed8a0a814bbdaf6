"""The words for who runs a graph's nodes, the same in the summary, the log and the errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ort_dynamo.report.record import GraphRecord
from ort_dynamo.segment.segment import EagerNode
from ort_dynamo.torch_internals.kernels.dropout_mask import DROPOUT_MASK

__all__ = ["BY_CHOICE", "BY_DESIGN", "FALLBACK", "PLACE", "EagerNodes", "NodeCounts", "by_reason", "section", "spoken"]

BY_DESIGN = "in torch by design"
BY_CHOICE = "in torch by choice (placement)"
FALLBACK = "in eager (fallback)"
PLACE = 'Set options={"placement": "onnxruntime"} to run these operators in ONNX Runtime.'


@dataclass(frozen=True)
class EagerNodes:
    """Fallback nodes with the same reason.

    Attributes:
        target: their overload or function, as text.
        reason: why ONNX Runtime cannot run them.
        lines: the user's lines of the nodes, each once, in order.
        count: the number of nodes.
    """

    target: str
    reason: str
    lines: tuple[str, ...]
    count: int

    def __str__(self) -> str:
        return "\n".join([f"{self.count} x {self.target}: {self.reason}", *(f"  {line}" for line in self.lines)])


def by_reason(nodes: Iterable[EagerNode]) -> tuple[EagerNodes, ...]:
    """Group nodes by their operator and their reason."""
    groups: dict[tuple[str, str], list[str]] = {}
    for node in nodes:
        groups.setdefault((node.target, node.reason), []).append(node.where)
    return tuple(
        EagerNodes(target, reason, tuple(dict.fromkeys(lines)), len(lines))
        for (target, reason), lines in groups.items()
    )


@dataclass(frozen=True)
class NodeCounts:
    """Counts of the nodes of some graphs by where they run; str() leaves out the chosen nodes if there are none.

    Attributes:
        native: overload, as text -> nodes that ONNX Runtime runs.
        by_design: overload, as text -> nodes that torch runs by design.
        chosen: "overload: reason", as text -> nodes that torch runs by choice.
        eager: the fallbacks.
    """

    native: Counter[str]
    by_design: Counter[str]
    chosen: Counter[str]
    eager: tuple[EagerNodes, ...]

    @classmethod
    def of(cls, graphs: Sequence[GraphRecord]) -> NodeCounts:
        """Add up several graphs."""
        return cls(
            native=sum((graph.native for graph in graphs), Counter()),
            by_design=sum((graph.by_design for graph in graphs), Counter()),
            chosen=sum((graph.chosen for graph in graphs), Counter()),
            eager=by_reason(node for graph in graphs for node in graph.eager),
        )

    @property
    def eager_nodes(self) -> int:
        """Number of fallback nodes."""
        return sum(nodes.count for nodes in self.eager)

    def __str__(self) -> str:
        choice = f"{self.chosen.total()} {BY_CHOICE}, " if self.chosen else ""
        return (
            f"{self.native.total()} in ONNX Runtime, {self.by_design.total()} {BY_DESIGN}, "
            f"{choice}{self.eager_nodes} {FALLBACK}"
        )

    def outside_sessions(self, advice: str = "") -> Iterator[str]:
        """List the nodes that torch runs instead of ONNX Runtime: first those by choice, then the fallbacks.

        Args:
            advice: a line after the nodes by choice.
        """
        yield from section(BY_CHOICE, _by_reason(self.chosen))
        if advice and self.chosen:
            yield f"  {advice}"
        yield from section(FALLBACK, map(str, self.eager))


def _by_reason(chosen: Counter[str]) -> Iterator[str]:
    """Yield a line for each reason, the most frequent first: the number of nodes, and the operators."""
    reasons: dict[str, Counter[str]] = {}
    for entry, count in chosen.items():
        target, _, reason = entry.partition(": ")
        reasons.setdefault(reason, Counter())[target] += count
    for reason, targets in sorted(reasons.items(), key=lambda one: -one[1].total()):
        names = [target for target, _ in targets.most_common()]
        more = f" and {len(names) - _NAMES} others" if len(names) > _NAMES + 1 else ""
        yield f"{targets.total()} x {', '.join(names[:_NAMES] if more else names)}{more}: {reason}"


_NAMES = 3


def spoken(target: str) -> str:
    """Return the program's name of an operator that is one of ours; other names do not change."""
    return _SPOKEN.get(target, target)


_SPOKEN = {str(DROPOUT_MASK): "random numbers of dropout"}


def section(title: str, texts: Iterable[str]) -> Iterator[str]:
    """Yield a heading and an indented text for each distinct entry, with how often it came."""
    counted = Counter(texts)
    if counted:
        yield f"{title}:"
    for text, count in counted.items():
        times = f" ({count} times)" if count > 1 else ""
        yield "\n".join("  " + line for line in (text + times).splitlines())
