"""Nodes that hold a graph's symbolic sizes, computed from the sizes of its placeholders or of given nodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node
from torch.fx.proxy import GraphAppendingTracer

from ort_dynamo.torch_internals.kernels.operators import aten
from ort_dynamo.torch_internals.sizes.symbols import given_expression
from ort_dynamo.torch_internals.sizes.sympy_functions import (
    FUNCTIONS_OF_SIZES,
    ROUNDED,
    PythonReferenceAnalysis,
    sympy_interp,
)

__all__ = ["SizeNodes"]


class SizeNodes:
    """Gives nodes of `graph` that hold symbolic sizes, and makes each once, where the graph inserts at that time.

    Args:
        graph: a graph that has all its placeholders, with fake values in meta["val"].
        meta: more metadata for the nodes made here.
        carriers: nodes before the place of insertion, from which sizes are read; by default the placeholders.
    """

    def __init__(
        self, graph: Graph, meta: Mapping[str, Any] | None = None, carriers: Iterable[Node] | None = None
    ) -> None:
        self._graph = graph
        self._carriers: list[Node] = []
        self._meta = dict(meta or {})
        self._tracer = _Tracer(graph, self._meta)  # one for all: operators of two proxies ask for that
        self._nodes: dict[Any, Node] = {}  # sympy expression -> the node that holds its value
        for node in graph.find_nodes(op="placeholder") if carriers is None else carriers:
            self.offer(node)

    def offer(self, node: Node) -> None:
        """Add a carrier: a node before the next place of insertion, whose sizes may depend on data."""
        self._carriers.append(node)
        if isinstance(fake := node.meta.get("val"), torch.SymInt):
            self._nodes.setdefault(given_expression(fake), node)

    def number(self, size: int | torch.SymInt) -> int | Node | None:
        """Return the integer, or a node that computes it; None if no carrier has one of its symbols.

        A rounded size in it is that of a carrier, if any has it.
        """
        if not isinstance(size, torch.SymInt):
            return size
        given = given_expression(size)
        if given in self._nodes:
            return self._nodes[given]
        known = {part: sympy.Dummy(integer=True) for part in given.atoms(*ROUNDED) if part in self._nodes}
        rest = given.xreplace(known)
        nodes = {symbol: self.carrier(symbol) for symbol in rest.free_symbols.difference(known.values())}
        nodes |= {symbol: self._nodes[part] for part, symbol in known.items()}
        symbols = {symbol: torch.fx.Proxy(node, self._tracer) for symbol, node in nodes.items() if node is not None}
        if len(symbols) < len(nodes):
            return None
        made = sympy_interp(_Arithmetic, symbols, rest)
        if not isinstance(made, torch.fx.Proxy):
            return int(made)
        made.node.meta["val"] = size
        self._nodes[given] = made.node
        return made.node

    def carrier(self, symbol: Any) -> Node | None:
        """Give a node that holds `symbol`, or any other expression: a carrier, or one that reads a carrier's shape."""
        if symbol in self._nodes:
            return self._nodes[symbol]
        for node in self._carriers:
            fake = node.meta.get("val")
            if not isinstance(fake, torch.Tensor):
                continue
            for axis, size in enumerate(fake.shape):
                if isinstance(size, torch.SymInt) and given_expression(size) == symbol:
                    self._nodes[symbol] = made = self._graph.call_function(aten.sym_size.int, (node, axis))
                    made.meta = {**self._meta, "val": size}
                    return made
        return None


class _Tracer(GraphAppendingTracer):
    """Computes each new node's value from those of its arguments."""

    def __init__(self, graph: Graph, meta: Mapping[str, Any]) -> None:
        super().__init__(graph)
        self._meta = meta

    def create_node(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **named: Any) -> Node:
        made = super().create_node(kind, target, args, kwargs, *rest, **named)
        given, options = torch.fx.node.map_arg((args, kwargs), lambda node: node.meta["val"])
        made.meta.update(self._meta, val=target(*given, **options))
        return made


def _rounding(function: Callable[[Any], int]) -> Any:
    """Make a method that rounds a number to an integer, of whichever dtype."""
    return staticmethod(lambda x, dtype: _applied(function, x))


class _Arithmetic(PythonReferenceAnalysis):
    """torch's arithmetic on Python scalars, for proxies of them also where torch's asks sympy or `math`."""

    @staticmethod
    def int_truediv(a: Any, b: Any) -> Any:
        return a / b

    ceil_to_int = _rounding(math.ceil)
    floor_to_int = _rounding(math.floor)
    trunc_to_int = _rounding(math.trunc)
    round_to_int = _rounding(round)

    @staticmethod
    def round_decimal(a: Any, b: Any) -> Any:
        return _applied(round, a, b)


for _name, _function in FUNCTIONS_OF_SIZES.items():
    setattr(_Arithmetic, _name, staticmethod(_function))


def _applied(function: Callable[..., Any], x: Any, *more: Any) -> Any:
    if isinstance(x, torch.fx.Proxy):
        return x.tracer.create_proxy("call_function", function, (x, *more), {})
    return function(x, *more)
