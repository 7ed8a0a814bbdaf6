"""A graph as plain values: small enough to store beside a compiled graph, and fit for a pickle where it can be."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate, map_arg

from ort_dynamo.torch_internals.kernels.operators import HigherOrderOperator, OpOverload, overload
from ort_dynamo.torch_internals.tracing.lazy_code import graph_module

__all__ = ["SerializedGraph", "spelled"]


@dataclass(frozen=True, slots=True)
class _Ref:
    """The value of another node, by its index."""

    index: int


@dataclass(frozen=True, slots=True)
class _Operator:
    """An overload or a higher-order operator, by its name below torch.ops."""

    name: str


@dataclass(frozen=True, slots=True)
class _Spelled:
    op: str
    target: Any
    args: Any
    kwargs: Any


@dataclass(frozen=True)
class SerializedGraph:
    """A graph without the metadata of its nodes.

    Attributes:
        nodes: its nodes, in order.
        subgraphs: the graphs that its get_attr nodes name.
        constants: anything else that they name.
        is_storable: whether a pickle holds it, and reads it without running a function of the program's.
    """

    nodes: tuple[_Spelled, ...]
    subgraphs: Mapping[str, SerializedGraph] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    is_storable: bool = True

    def arguments(self, index: int) -> tuple[list[int], list[Any]]:
        """Give the arguments of a node: the indices of the nodes that it reads, and its constants."""
        inputs: list[int] = []
        constants: list[Any] = []

        def sort(one: Any) -> None:
            if isinstance(one, _Ref):
                inputs.append(one.index)
            else:
                constants.append(one)

        map_aggregate((self.nodes[index].args, self.nodes[index].kwargs), sort)
        return inputs, constants

    def module(self, modules: Mapping[str, Any]) -> GraphModule:
        """Return the graph, anew.

        Args:
            modules: the modules that its call_module nodes name.
        """
        graph = Graph()
        made: list[Node] = []
        for node in self.nodes:
            target = overload(node.target.name) if isinstance(node.target, _Operator) else node.target
            args, kwargs = map_aggregate(
                (node.args, node.kwargs), lambda one: made[one.index] if isinstance(one, _Ref) else one
            )
            made.append(graph.create_node(node.op, target, args, kwargs))
        inner = {name: one.module({}) for name, one in self.subgraphs.items()}
        return graph_module({**self.constants, **inner, **modules}, graph)


def spelled(gm: GraphModule) -> SerializedGraph:
    """Spell a graph, without its modules."""
    indices: dict[Node, _Ref] = {}
    nodes = []
    subgraphs: dict[str, SerializedGraph] = {}
    constants: dict[str, Any] = {}
    is_storable = True
    for node in gm.graph.nodes:
        target = node.target
        if isinstance(target, OpOverload):
            target = _Operator(str(target))
        elif isinstance(target, HigherOrderOperator):
            target = _Operator(f"higher_order.{target}")
        elif node.op == "get_attr":
            found = operator.attrgetter(str(target))(gm)
            if isinstance(found, GraphModule):
                subgraphs[str(target)] = spelled(found)
            else:
                constants[str(target)] = found
        elif node.op not in ("placeholder", "output", "call_module"):
            is_storable &= _is_importable(target)
        arguments: Any = map_arg((node.args, node.kwargs), indices.__getitem__)  # type: ignore[arg-type]
        is_storable &= _is_plain(arguments)
        nodes.append(_Spelled(node.op, target, *arguments))
        indices[node] = _Ref(len(indices))
    is_storable &= not constants and all(one.is_storable for one in subgraphs.values())
    return SerializedGraph(tuple(nodes), subgraphs, constants, is_storable)


_MODULES = ("_operator", "math", "torch", "ort_dynamo")


def _is_importable(target: Any) -> bool:
    """Check whether a pickle of a function holds just its name."""
    module, name = getattr(target, "__module__", None) or "", getattr(target, "__qualname__", "")
    return module.partition(".")[0] in _MODULES and bool(name) and "<" not in name and "." not in name


def _is_plain(value: Any) -> bool:
    match value:
        case None | bool() | int() | float() | complex() | str() | _Ref():
            return True
        case torch.dtype() | torch.device() | torch.layout() | torch.memory_format():
            return True
        case tuple() | list():
            return all(map(_is_plain, value))
        case dict():
            return all(map(_is_plain, value.values()))
        case slice():
            return all(map(_is_plain, (value.start, value.stop, value.step)))
    return False
