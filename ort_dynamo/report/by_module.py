"""Counts the operators of each of the user's modules by where they run, as data and as a few lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ort_dynamo.graph.source_line import Owner
from ort_dynamo.report.node_counts import BY_DESIGN, FALLBACK
from ort_dynamo.report.record import GraphRecord

__all__ = ["Model", "ModuleNodes", "by_module", "module_lines"]

_WORDS = {
    "native": "in ONNX Runtime",
    "chosen": "in torch by choice",
    "by_design": BY_DESIGN,
    "eager": FALLBACK,
}


@dataclass(frozen=True)
class ModuleNodes:
    """The nodes that one module's own code calls in forward and backward, by where they run; submodules have their own.

    Attributes:
        model: the class of the module whose forward was compiled; "" for a function that calls no module.
        path: the module's path in the model, as in named_modules(); "" for the model itself.
        kind: the module's class; "" for nodes that no submodule of the model calls.
        native: the number of nodes in ONNX Runtime.
        chosen: the number of nodes in torch by choice.
        by_design: the number of nodes in torch by design.
        eager: the number of fallbacks.
        number: counts the models of one class from 1, in the order in which they were compiled.
    """

    model: str
    path: str
    kind: str
    native: int
    chosen: int
    by_design: int
    eager: int
    number: int = 1


class Model(NamedTuple):
    """The function whose graphs are added up.

    Attributes:
        name: the class of the module whose forward it is; "" for a function. Dynamo names only the submodules.
        identity: distinguishes it from others of that name.
    """

    name: str
    identity: Hashable


def by_module(graphs: Iterable[tuple[Model, GraphRecord]]) -> tuple[ModuleNodes, ...]:
    """Add up graphs by module, each with the function that it is of."""
    found: dict[tuple[Owner, int], Counter[str]] = {}
    numbers: dict[str, dict[Hashable, int]] = {}
    for model, graph in graphs:
        for owner, nodes in graph.modules.items():
            name = owner.model or model.name
            same = numbers.setdefault(name, {})
            number = same.setdefault(model.identity, len(same) + 1) if name else 1
            found.setdefault((owner._replace(model=name), number), Counter()).update(nodes)
    return tuple(
        ModuleNodes(*owner, nodes["native"], nodes["chosen"], nodes["by_design"], nodes["eager"], number)
        for (owner, number), nodes in found.items()
    )


@dataclass
class _Tree:
    """A module, or several of one class that are numbered one after another."""

    name: str
    kind: str = ""
    times: int = 1
    nodes: Counter[str] = field(default_factory=Counter)
    children: dict[str, _Tree] = field(default_factory=dict)

    def total(self) -> Counter[str]:
        return sum((child.total() for child in self.children.values()), Counter(self.nodes))

    def add(self, other: _Tree) -> None:
        self.nodes.update(other.nodes)
        for name, child in other.children.items():
            if name in self.children:
                self.children[name].add(child)
            else:
                self.children[name] = child

    def merged(self) -> _Tree:
        """Merge modules of one class with consecutive numbers into one entry."""
        merged: dict[str, _Tree] = {}
        last: _Tree | None = None
        for child in (one.merged() for one in self.children.values()):
            if last is not None and last.kind == child.kind and _follows(last.name, child.name):
                last.add(child)
                last.times += 1
                last.name = f"{last.name.partition('-')[0]}-{child.name}"
            else:
                last = merged[child.name] = child
        self.children = {child.name: child for child in merged.values()}
        return self

    def is_mixed(self) -> bool:
        return len({"native", "chosen", "eager"} & {who for who, count in self.total().items() if count}) > 1


def _follows(name: str, following: str) -> bool:
    last = name.rpartition("-")[2]
    return last.isdecimal() and following.isdecimal() and int(following) == int(last) + 1


def module_lines(modules: Sequence[ModuleNodes], most: int = 8) -> Iterator[str]:
    """Yield a heading for each model, and lines of its modules; all lines add up to the nodes. None without modules.

    A module is listed with all that is inside it. If its submodules run in different places, they are listed instead,
    as long as the model has few lines. Models of one class have numbers.

    Args:
        modules: all modules.
        most: the largest number of lines of one model.
    """
    functions = [one for one in modules if not one.kind and not one.model]
    models = _models([one for one in modules if one.kind or one.model])
    for heading, members in list(models.items())[:_MODELS]:
        yield f"{heading}:"
        yield from (f"  {line}" for line in _lines(members, most))
    if len(models) > _MODELS:
        rest = [one for members in list(models.values())[_MODELS:] for one in members]
        more = len(models) - _MODELS
        yield f"modules of {more} more model{'s' * (more > 1)}: {_counts(_total(rest))}"
    if models and _total(functions).total():
        yield f"outside of modules: {_counts(_total(functions))}"


_MODELS = 3


def _models(modules: Sequence[ModuleNodes]) -> dict[str, list[ModuleNodes]]:
    """Return the modules of each model by its heading; many models of one class share one."""
    numbers: dict[str, set[int]] = {}
    for one in modules:
        numbers.setdefault(one.model, set()).add(one.number)
    models: dict[str, list[ModuleNodes]] = {}
    for one in modules:
        count = len(numbers[one.model])
        heading = f"modules of {one.model}" if one.model else "modules"
        if count > _MODELS:
            heading = f"modules of {count} x {one.model}"
        elif count > 1:
            heading = f"{heading} {one.number}"
        models.setdefault(heading, []).append(one)
    return models


def _total(modules: Iterable[ModuleNodes]) -> Counter[str]:
    return sum((_nodes(one) for one in modules), Counter[str]())


def _nodes(one: ModuleNodes) -> Counter[str]:
    return Counter({who: getattr(one, who) for who in _WORDS})


def _lines(members: Sequence[ModuleNodes], most: int) -> Iterator[str]:
    model = members[0].model
    shown = _opened(_tree(model, members).merged(), most)
    for path, tree in shown[:most]:
        kind = f"{tree.times} x {tree.kind}" if tree.times > 1 else tree.kind
        name = f"{path} ({kind})" if path and kind else path or (model if len(shown) == 1 else "outside of these")
        yield f"{name}: {_counts(tree.total())}"
    if len(shown) > most:
        rest = sum((tree.total() for _, tree in shown[most:]), Counter[str]())
        yield f"{len(shown) - most} more: {_counts(rest)}"


def _tree(model: str, members: Sequence[ModuleNodes]) -> _Tree:
    root = _Tree("", model)
    for one in members:
        tree = root
        for name in one.path.split(".") if one.path else ():
            tree = tree.children.setdefault(name, _Tree(name))
        tree.kind = one.kind or tree.kind
        tree.nodes.update(_nodes(one))
    return root


def _opened(root: _Tree, most: int) -> list[tuple[str, _Tree]]:
    """Return the modules to show, by their paths: first those of the model itself, then those inside of mixed ones."""
    inside = _inside("", root)
    shown = [one for one in inside if one[0]] + [one for one in inside if not one[0]]
    while True:
        for index, (path, tree) in enumerate(shown):
            inside = _inside(path, tree) if tree.children and (tree.is_mixed() or not tree.kind) else []
            if inside and len(shown) - 1 + len(inside) <= most:
                shown[index : index + 1] = inside
                break
        else:
            return shown


def _inside(path: str, tree: _Tree) -> list[tuple[str, _Tree]]:
    children = [(f"{path}.{name}" if path else name, child) for name, child in tree.children.items()]
    itself = [(path, _Tree(tree.name, tree.kind, tree.times, tree.nodes))] if tree.nodes.total() else []
    return itself + children


def _counts(nodes: Mapping[str, int]) -> str:
    return ", ".join(f"{nodes[who]} {word}" for who, word in _WORDS.items() if nodes[who]) or "nothing to compute"
