"""Groups the facts of an explanation for people: by reason, by maker, by module and by time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from ort_dynamo.explanation.data import Call, Graph, Operator, Role
from ort_dynamo.report.node_counts import spoken

__all__ = [
    "ORDER",
    "By",
    "Group",
    "Moment",
    "Share",
    "outside",
    "saved_by",
    "shares",
    "stage_times",
    "step",
    "time_by",
]


@dataclass(frozen=True)
class Group:
    """Operators of one graph that torch runs for one reason.

    Attributes:
        role: the graph's.
        place: "chosen", "eager" or "by_design".
        overload: the ATen overload.
        reason: why torch runs them; "" of those that it runs by design.
        change: the option or call that changes it; "" if there is none.
        count: how many there are.
        lines: the user's lines, each once.
        modules: the modules that call them, each once.
    """

    role: str
    place: str
    overload: str
    reason: str
    change: str
    count: int
    lines: tuple[str, ...]
    modules: tuple[str, ...]


def outside(roles: Iterable[Role]) -> tuple[Group, ...]:
    """Group the operators that torch runs: fallbacks first, then those of its choice, then those by design."""
    found: dict[tuple[str, str, str, str, str], list[Operator]] = {}
    for role in roles:
        for one in role.operators:
            if one.place in ORDER:
                key = (role.name, one.place, one.overload, one.reason, one.change)
                found.setdefault(key, []).append(one)
    groups = [
        Group(*key, len(every), _once(one.line for one in every), _once(one.module for one in every if one.kind))
        for key, every in found.items()
    ]
    return tuple(sorted(groups, key=lambda one: (ORDER.index(one.place), -one.count)))


ORDER = ("eager", "chosen", "by_design")
"""The places of operators that torch runs, in the order in which they are told."""


def _once(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(texts))


@dataclass(frozen=True)
class Share:
    """A part of a sum.

    Attributes:
        name: the part's name.
        amount: its bytes or seconds.
        count: how many entries it has.
        lines: the user's lines, each once.
    """

    name: str
    amount: float
    count: int
    lines: tuple[str, ...] = ()


By = Literal["operator", "class", "module"]
"""The entry's operator, the class of the module that called it, or the module, such as a layer."""


def saved_by(graphs: Sequence[Graph], by: By = "operator") -> tuple[Share, ...]:
    """Add up saved tensors; operators are told apart by the class of the module that called them."""
    entries = [
        (
            f"{spoken(one.operator)}{f' in {one.kind}' if one.kind else ''}"
            if by == "operator"
            else _named(one.module, one.kind, by),
            float(one.nbytes),
            one.line if by == "operator" else "",
        )
        for graph in graphs
        for one in graph.saved
    ]
    return shares(entries)


def time_by(graphs: Sequence[Graph], by: By = "operator") -> tuple[Share, ...]:
    """Add up measured times."""
    entries = [
        (one.overload if by == "operator" else _named(one.module, one.kind, by), one.seconds, _line(one, by))
        for graph in graphs
        for role in graph.roles
        for one in role.operators
        if one.seconds is not None
    ]
    return shares(entries)


def _line(one: Operator, by: By) -> str:
    return one.line if by == "operator" else ""


def _named(module: str, kind: str, by: By) -> str:
    return (kind if by == "class" else layer(module)) or "outside of modules"


def layer(module: str) -> str:
    """Return the part of a module's path up to its first number, such as a layer; of others the first two names."""
    names = module.split(".") if module else []
    count = next((index for index, name in enumerate(names, start=1) if name.isdecimal()), 2)
    return ".".join(names[:count])


def shares(entries: Iterable[tuple[str, float, str]]) -> tuple[Share, ...]:
    """Add up (name, amount, line) by name, most first."""
    amounts: dict[str, float] = {}
    counts: Counter[str] = Counter()
    lines: dict[str, list[str]] = {}
    for name, amount, line in entries:
        amounts[name] = amounts.get(name, 0.0) + amount
        counts[name] += 1
        lines.setdefault(name, []).append(line)
    found = (Share(name, amount, counts[name], _once(lines[name])) for name, amount in amounts.items())
    return tuple(sorted(found, key=lambda one: -one.amount))


@dataclass(frozen=True)
class Moment:
    """One operator of a step, with the memory of all graphs.

    Attributes:
        role: "forward", "backward" or another graph's.
        overload: the ATen overload.
        place: where it runs.
        module: path of the module that called it.
        group: the part of the path up to its first number, such as a layer.
        line: the user's line.
        alive: bytes alive in all graphs, inputs and parameters not counted.
    """

    role: str
    overload: str
    place: str
    module: str
    group: str
    line: str
    alive: int


def step(graphs: Sequence[Graph], calls: Sequence[Call]) -> tuple[Moment, ...]:
    """Give the operators of a step: the forwards, then the backwards from the last call to the first.

    While a graph runs, the saved tensors of the calls before it are alive as well.
    """
    found: list[Moment] = []
    saved = 0
    held: list[tuple[Graph, int]] = []
    for call in calls:
        graph = graphs[call.graph]
        held.append((graph, saved))
        found += (
            _moment(role, one, saved) for role in graph.roles if role.name != "backward" for one in role.operators
        )
        saved += call.saved
    for graph, before in reversed(held):
        found += (
            _moment(role, one, before) for role in graph.roles if role.name == "backward" for one in role.operators
        )
    return tuple(found)


def _moment(role: Role, one: Operator, before: int) -> Moment:
    return Moment(role.name, one.overload, one.place, one.module, layer(one.module), one.line, one.alive + before)


def stage_times(graphs: Sequence[Graph]) -> dict[str, float]:
    """Add up the seconds of each stage of the compiles."""
    found: dict[str, float] = {}
    for graph in graphs:
        for name, seconds in graph.stages.items():
            found[name] = found.get(name, 0.0) + seconds
    return found
