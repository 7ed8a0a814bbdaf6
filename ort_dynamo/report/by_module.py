"""Counts the operators of each of the user's modules by where they run, as data and as a few lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ort_dynamo.report.places import BY_DESIGN, FALLBACK
from ort_dynamo.report.record import GraphRecord
from ort_dynamo.source_line import Owner

__all__ = ["ModuleNodes", "by_module", "module_lines"]

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
        model: the class of the module whose forward was compiled; "" for a function.
        path: the module's path in the model, as in named_modules(); "" for the model itself.
        kind: the module's class; "" for nodes that no submodule of the model calls.
        native: the number of nodes in ONNX Runtime.
        chosen: the number of nodes in torch by choice.
        by_design: the number of nodes in torch by design.
        eager: the number of fallbacks.
    """

    model: str
    path: str
    kind: str
    native: int
    chosen: int
    by_design: int
    eager: int


def by_module(graphs: Iterable[tuple[str, GraphRecord]]) -> tuple[ModuleNodes, ...]:
    """Add up graphs by module.

    Args:
        graphs: each with the class of the module whose forward was compiled, since Dynamo names only its submodules;
            "" for a function.
    """
    found: dict[Owner, Counter[str]] = {}
    for model, graph in graphs:
        for owner, nodes in graph.modules.items():
            found.setdefault(owner._replace(model=owner.model or model), Counter()).update(nodes)
    return tuple(
        ModuleNodes(*owner, nodes["native"], nodes["chosen"], nodes["by_design"], nodes["eager"])
        for owner, nodes in found.items()
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
    """Yield a heading for each model, and lines of its modules.

    A module is listed with all that is inside it. If its submodules run in different places, they are listed instead,
    as long as the model has few lines.
    """
    models: dict[str, list[ModuleNodes]] = {}
    for one in modules:
        if one.kind or one.model:
            models.setdefault(one.model, []).append(one)
    for model, members in list(models.items())[:_MODELS]:
        yield f"modules of {model}:" if model else "modules:"
        yield from (f"  {line}" for line in _lines(model, members, most))
    if len(models) > _MODELS:
        yield f"and modules of {len(models) - _MODELS} more models"


_MODELS = 3


def _lines(model: str, members: Sequence[ModuleNodes], most: int) -> Iterator[str]:
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
        tree.nodes.update({who: getattr(one, who) for who in _WORDS})
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
