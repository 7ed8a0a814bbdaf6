"""The key of a compiled graph: its whole content, and nothing else.

Two graphs that differ in an edge, a constant, a dtype, a shape, a symbol's position or kind, a stride, a device, an
option, the target or a version have different keys. Names of nodes and of size symbols are not in the key. Facts about
sizes (guards, ranges, the example's values) are in the key only if a lowering asked for them, as the answers that it
got. The order of dimensions in memory at the boundary is in the key, too. So batch sizes 8 and 16 share a key, but a
divisor that a guard makes positive and one that may be zero do not.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeGuard

import sympy
import torch
from torch.fx import GraphModule, Node

from ort_dynamo.graph.boundary import input_spec, output_spec
from ort_dynamo.graph.function_key import NotKeyableError, spell_function
from ort_dynamo.graph.marks import GATE, IGNORES_NAN
from ort_dynamo.torch_internals.kernels.operators import HigherOrderOperator, OpOverload
from ort_dynamo.torch_internals.sizes.size_guards import SIZE_FACTS, Fact
from ort_dynamo.torch_internals.sizes.symbols import assumptions, by_number, given_expression, kind

__all__ = ["GraphKey", "graph_key", "spell_node"]


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
    """Return the key of `gm` compiled in `context`, or None if the graph holds something that cannot be keyed.

    Args:
        gm: placeholders, call_function nodes and one output, with fake values in meta["val"], and, in
            meta[SIZE_FACTS], the answers about sizes that the nodes' lowerings got.
        context: everything else that decides the result (options, target, passes), each identified by its repr.
        functions: role -> function of the user that decides the result, too; identified by behaviour.

    Raises:
        TypeError: the repr of a context value contains an address.
    """
    writer = _Writer()
    try:
        for node in gm.graph.nodes:
            writer.write_node(node)
        writer.write_outputs(gm.graph.output_node().all_input_nodes)
        written = [f"{role}: {spell_function(function)}" for role, function in sorted((functions or {}).items())]
    except NotKeyableError:
        return None
    described = list(map(repr, context))
    if any(" at 0x" in text for text in described):
        raise TypeError(f"the context of a graph key must have reprs that spell content: {described}")
    lines = [*_versions(), *described, *written, *writer.lines, *writer.symbols()]
    return GraphKey(hashlib.sha256("\n".join(lines).encode()).hexdigest())


def spell_node(node: Node) -> str | None:
    """All that a key holds of a node of fixed sizes when it stands alone, and which of its outputs are read.

    Args:
        node: with fake values in its meta["val"] and those of its arguments.

    Returns:
        Text that nodes have in common that cannot be told apart by lowering; None of a node with symbolic sizes, or one
        that cannot be keyed.
    """
    writer = _Writer()
    try:
        for argument in node.all_input_nodes:
            writer.write_argument(argument)
        writer.write_node(node)
    except NotKeyableError:
        return None
    if writer.symbols():
        return None
    read = sorted({str(user.args[1]) for user in node.users if user.target is operator.getitem})
    return "\n".join([*writer.lines, *read])


class _Writer:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self._numbers: dict[Node, int] = {}
        self._symbols: dict[sympy.Symbol, sympy.Symbol] = {}
        self._expressions: dict[sympy.Basic, str] = {}

    def write_node(self, node: Node) -> None:
        self._numbers[node] = len(self._numbers)
        target = "" if node.op in ("placeholder", "output", "get_attr") else _spell_target(node.target)
        arguments = [] if node.op == "placeholder" else [self._spell(node.args), self._spell(node.kwargs)]
        self.lines.append("|".join([node.op, target, *arguments, self._spell(node.meta.get("val"))]))
        if node.op == "placeholder":
            self.lines.append(f"enters {input_spec(node.meta.get('val'))}")
        self.lines.extend(mark for mark in (GATE, IGNORES_NAN) if node.meta.get(mark))
        self.lines.extend(map(self._spell_fact, node.meta.get(SIZE_FACTS, ())))

    def write_argument(self, node: Node) -> None:
        """Write the known facts of a value that comes from elsewhere."""
        self._numbers[node] = len(self._numbers)
        self.lines.append(self._spell(node.meta.get("val")))

    def write_outputs(self, nodes: Iterable[Node]) -> None:
        """Write how the values of `nodes` leave the graph."""
        fakes = (node.meta.get("val") for node in nodes)
        self.lines.extend(f"leaves {output_spec(fake)}" for fake in fakes if _is_strided(fake))

    def symbols(self) -> list[str]:
        """Describe the symbols, in order of first sight: the kind of each, and sympy's assumptions about it."""
        return [f"{name}: {kind(symbol)} {assumptions(symbol)}" for symbol, name in self._symbols.items()]

    def _spell_fact(self, fact: Fact) -> str:
        return f"{fact.question} {','.join(map(self._spell_expr, fact.about))}: {fact.answer}"

    def _spell(self, value: Any) -> str:
        match value:
            case Node():
                return f"%{self._numbers[value]}"
            case torch.Tensor():
                return self._spell_tensor(value)
            case GraphModule():
                return self._spell_subgraph(value)
            case torch.SymInt() | torch.SymFloat() | torch.SymBool():
                return f"sym({self._spell_expr(given_expression(value))})"
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
        parts = [fake.shape, fake.stride(), [fake.storage_offset()]] if _is_strided(fake) else [fake.shape]
        return " ".join([f"{fake.dtype} {fake.device} {fake.layout}", *map(self._spell_sizes, parts)])

    def _spell_sizes(self, sizes: Iterable[int | torch.SymInt]) -> str:
        return ",".join(self._spell_expr(given_expression(s)) if isinstance(s, torch.SymInt) else str(s) for s in sizes)

    def _spell_expr(self, expr: sympy.Basic) -> str:
        if expr not in self._expressions:
            # Symbols are renamed in order of appearance, so s0 and s77 at the same positions give the same graph.
            for symbol in sorted(expr.free_symbols - self._symbols.keys(), key=by_number):
                self._symbols[symbol] = sympy.Symbol(f"d{len(self._symbols)}", **assumptions(symbol))
            self._expressions[expr] = _spell_tree(expr.xreplace(self._symbols))
        return self._expressions[expr]


def _is_strided(fake: Any) -> TypeGuard[torch.Tensor]:
    """Check whether a fake value is a tensor that has strides."""
    return isinstance(fake, torch.Tensor) and fake.layout is torch.strided


def _spell_tree(expr: sympy.Basic) -> str:
    """Return an expression with the classes of its parts: torch's exact and rounding-down quotients print alike."""
    if not expr.args:
        return sympy.srepr(expr) if expr.is_Float else str(expr)
    return f"{type(expr).__name__}({','.join(map(_spell_tree, expr.args))})"


def _spell_target(target: Any) -> str:
    if isinstance(target, (OpOverload, HigherOrderOperator)):
        return str(target)
    module, name = getattr(target, "__module__", None), getattr(target, "__qualname__", None)
    if module is None or name is None:
        raise NotKeyableError(target)
    return f"{module}.{name}"


@cache
def _versions() -> tuple[str, ...]:
    packages = ("ort-dynamo", "torch", "onnx", "onnx-ir", "onnxscript", "numpy", "sympy")
    return tuple(f"{package}={_version(package)}" for package in packages)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unpacked"
