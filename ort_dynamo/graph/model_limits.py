"""Limits on ONNX models from elsewhere: nodes with all functions inlined, and the depth of graphs and calls."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto

from ort_dynamo.errors import OnnxModelError

__all__ = ["DEEPEST", "MOST_NODES", "FunctionKey", "check_limits", "domain_of", "function_key", "subgraphs"]

DEEPEST = 20
"""Graphs within graphs, and functions that call functions, together; protobuf itself ends at about 32 graphs."""
MOST_NODES = 200_000
"""The maximum number of nodes, with the nodes of a function counted at each call."""

FunctionKey: TypeAlias = tuple[str, str, str]


def domain_of(name: str) -> str:
    """Return a domain without ONNX's second name for its own."""
    return "" if name == "ai.onnx" else name


def function_key(node: NodeProto) -> FunctionKey:
    """Return the key of the function that a node calls."""
    return domain_of(node.domain), node.op_type, node.overload


def subgraphs(node: NodeProto) -> list[GraphProto]:
    """Return the graphs in a node's attributes."""
    return [
        *(attribute.g for attribute in node.attribute if attribute.type == AttributeProto.GRAPH),
        *(graph for attribute in node.attribute for graph in attribute.graphs),
    ]


def check_limits(model: ModelProto) -> int:
    """Count the nodes of a model, with all functions inlined.

    Raises:
        OnnxModelError: there are more than MOST_NODES, or graphs and calls are nested deeper than DEEPEST; a function
            is defined twice or calls itself; a name is not text.
    """
    try:
        return _Counter(model).count()
    except UnicodeDecodeError as error:  # protobuf decodes a name when it is read
        raise OnnxModelError(reason=f"a name in it is not text: {error}") from error


class _Counter:
    def __init__(self, model: ModelProto) -> None:
        self._graph = model.graph
        self._functions: dict[FunctionKey, FunctionProto] = {}
        for function in model.functions:
            key = domain_of(function.domain), function.name, function.overload
            if key in self._functions:
                raise OnnxModelError(reason=f"the function {key} is defined twice")
            self._functions[key] = function
        self._known: dict[FunctionKey, tuple[int, int]] = {}
        self._calls: list[FunctionKey] = []

    def count(self) -> int:
        for key in self._functions:
            self._measure_call(key, 0)
        return self._measure(self._graph.node, 0)[0]

    def _measure(self, nodes: Iterable[NodeProto], depth: int) -> tuple[int, int]:
        """Return the number of nodes, and how deep graphs and calls are nested in them."""
        found = height = 0
        for node in nodes:
            key = function_key(node)
            inner = [self._measure_call(key, depth + 1) if key in self._functions else (1, -1)]
            for graph in subgraphs(node):
                if depth >= DEEPEST:
                    raise OnnxModelError(reason=f"graphs are nested deeper than {DEEPEST}")
                inner.append(self._measure(graph.node, depth + 1))
            found += sum(count for count, _ in inner)
            height = max(height, *(1 + levels for _, levels in inner))
            if found > MOST_NODES:
                raise OnnxModelError(reason=f"it has more than {MOST_NODES} nodes")
        return found, height

    def _measure_call(self, key: FunctionKey, depth: int) -> tuple[int, int]:
        if key in self._calls:
            raise OnnxModelError(reason=f"the function {key[1]!r} calls itself")
        if depth + self._known.get(key, (0, 0))[1] > DEEPEST:
            raise OnnxModelError(reason=f"functions call one another deeper than {DEEPEST}")
        if key not in self._known:
            self._calls.append(key)
            self._known[key] = self._measure(self._functions[key].node, depth)
            self._calls.pop()
        return self._known[key]
