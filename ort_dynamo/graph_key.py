"""The key of a compiled graph, made from content alone and completely.

Two graphs that differ in an edge, a constant, a dtype, a shape, a symbol's place, a stride, a device, an option, the
target or a version have different keys. Names of nodes and of size symbols do not enter.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from ort_dynamo.function_key import NotKeyableError, spell_function

__all__ = ["GraphKey", "graph_key"]


@dataclass(frozen=True)
class GraphKey:
    """Identity of a compiled graph.

    Attributes:
        digest: SHA-256 of everything that went in, as hex.
    """

    digest: str

    def __str__(self) -> str:
        return self.digest[:16]


def graph_key(
    gm: GraphModule, *context: object, functions: Mapping[str, Callable[..., Any]] | None = None
) -> GraphKey | None:
    """The key of `gm` compiled in `context`, or None if the graph holds something that cannot be keyed.

    Args:
        gm: placeholders, call_function nodes and one output, with fake values in meta["val"].
        context: everything else that decides the result (options, target, passes), each identified by its repr.
        functions: functions of the user's that decide it, too, by the role each plays; identified by what they do.

    Raises:
        TypeError: a context value whose repr is an address.
    """
    writer = _Writer()
    try:
        for node in gm.graph.nodes:
            writer.write_node(node)
        written = [f"{role}: {spell_function(function)}" for role, function in sorted((functions or {}).items())]
    except NotKeyableError:
        return None
    described = list(map(repr, context))
    if any(" at 0x" in text for text in described):
        raise TypeError(f"the context of a graph key must have reprs that spell content: {described}")
    lines = [*_versions(), *described, *written, *writer.lines]
    return GraphKey(hashlib.sha256("\n".join(lines).encode()).hexdigest())


class _Writer:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self._numbers: dict[Node, int] = {}
        self._symbols: dict[sympy.Symbol, sympy.Symbol] = {}

    def write_node(self, node: Node) -> None:
        self._numbers[node] = len(self._numbers)
        target = "" if node.op in ("placeholder", "output", "get_attr") else _spell_target(node.target)
        arguments = [] if node.op == "placeholder" else [self._spell(node.args), self._spell(node.kwargs)]
        self.lines.append("|".join([node.op, target, *arguments, self._spell(node.meta.get("val"))]))

    def _spell(self, value: Any) -> str:
        match value:
            case Node():
                return f"%{self._numbers[value]}"
            case torch.Tensor():
                return self._spell_tensor(value)
            case GraphModule():
                return self._spell_subgraph(value)
            case torch.SymInt() | torch.SymFloat() | torch.SymBool():
                return f"sym({self._spell_expr(value.node.expr)})"
            case float():
                return f"float({value.hex()})"
            case None | bool() | int() | str() | complex():
                return f"{type(value).__name__}({value!r})"
            case torch.dtype() | torch.device() | torch.layout() | torch.memory_format():
                return str(value)
            case tuple() | list() | torch.Size():
                return "[" + ",".join(map(self._spell, value)) + "]"
            case dict():
                return "{" + ",".join(f"{k}:{self._spell(v)}" for k, v in sorted(value.items())) + "}"
            case slice():
                return f"slice({self._spell([value.start, value.stop, value.step])})"
        raise NotKeyableError(type(value))

    def _spell_subgraph(self, gm: GraphModule) -> str:
        start = len(self.lines)
        for node in gm.graph.nodes:
            if node.op == "get_attr" and isinstance(found := operator.attrgetter(str(node.target))(gm), GraphModule):
                node.meta.setdefault("val", found)
            elif node.op == "get_attr":
                raise NotKeyableError(node.target)  # a tensor, whose values count
            self.write_node(node)
        written, self.lines[start:] = self.lines[start:], []
        return f"graph({';'.join(written)})"

    def _spell_tensor(self, fake: torch.Tensor) -> str:
        strides = fake.stride() if fake.layout is torch.strided else ()
        sizes = self._spell_sizes(fake.shape), self._spell_sizes(strides)
        return f"{fake.dtype} {fake.device} {fake.layout} {sizes[0]} {sizes[1]}"

    def _spell_sizes(self, sizes: Iterable[int | torch.SymInt]) -> str:
        return ",".join(self._spell_expr(s.node.expr) if isinstance(s, torch.SymInt) else str(s) for s in sizes)

    def _spell_expr(self, expr: sympy.Expr) -> str:
        # Symbols are renamed in order of first sight, so s0 and s77 in the same places make the same graph.
        for symbol in sorted(expr.free_symbols, key=str):
            self._symbols.setdefault(symbol, sympy.Symbol(f"d{len(self._symbols)}", integer=True))
        return str(expr.xreplace(self._symbols))


def _spell_target(target: Any) -> str:
    if isinstance(target, (torch._ops.OpOverload, torch._ops.HigherOrderOperator)):
        return str(target)
    module, name = getattr(target, "__module__", None), getattr(target, "__qualname__", None)
    if module is None or name is None:
        raise NotKeyableError(target)
    return f"{module}.{name}"


@cache
def _versions() -> tuple[str, ...]:
    packages = ("ort-dynamo", "torch", "onnx", "onnx-ir", "onnxscript")
    return tuple(f"{package}={_version(package)}" for package in packages)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unpacked"
