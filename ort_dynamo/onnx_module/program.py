"""The graph of torch's functions that is written for a graph of ONNX, and the values of its names meanwhile."""

from __future__ import annotations

import keyword
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from onnx import AttributeProto, TypeProto
from torch import Tensor, fx, nn

from ort_dynamo.errors import OnnxModelError
from ort_dynamo.onnx_module.host_values import HOST_LIMIT, Host

__all__ = ["Known", "Program", "Scope", "Stored"]


@dataclass(eq=False)
class Stored:
    """An initializer or a constant: a tensor that the module holds.

    Attributes:
        key: its key below the module.
        data: its initial value; None for a large initializer whose data was removed.
        dtype: the dtype of its elements.
        shape: its shape.
        weight: whether it can be trained.
        uses: its roles as an input of nodes: "data", "statistic" or "setting".
    """

    key: str
    data: Tensor | None
    dtype: torch.dtype
    shape: tuple[int, ...]
    weight: bool
    uses: set[str] = field(default_factory=set)

    def as_host(self, setting: bool) -> Host | None:
        """Return its elements, if it is a scalar or a short vector and no weight."""
        short = len(self.shape) < 2 and all(size <= HOST_LIMIT for size in self.shape)
        floats = self.dtype.is_floating_point and len(self.shape) > 0
        if self.data is None or not short or (not setting and (self.weight or floats)):
            return None
        if setting:
            self.uses.add("setting")
        values = self.data.tolist()
        scalar = not self.shape
        return Host((values,) if scalar else tuple(values), scalar, self.dtype, True)


Known: TypeAlias = fx.Node | Stored | Host | None
"""The value of a name; None for an omitted input."""


class Scope:
    """The names that a graph may read, with those of the graphs around it.

    Args:
        outer: the scope of the graph around; None in a function.
        opsets: the version of each domain.
        attributes: the attributes of a function in this call; None outside of functions.
        types: the types that onnx inferred for the values.
    """

    def __init__(
        self,
        outer: Scope | None,
        opsets: Mapping[str, int],
        attributes: Mapping[str, AttributeProto] | None = None,
        types: Mapping[str, TypeProto] | None = None,
    ) -> None:
        self.outer = outer
        self.opsets = opsets
        self.attributes = attributes
        self.types: Mapping[str, TypeProto] = types or {}
        self._known: dict[str, Known] = {}

    def inner(self) -> Scope:
        """Return the scope of a graph in a node's attribute."""
        return Scope(self, self.opsets, self.attributes)

    def define(self, name: str, value: Known) -> None:
        """Give a name its value.

        Raises:
            OnnxModelError: the name has a value already.
        """
        if name in self._known:
            raise OnnxModelError(reason=f"two values have the name {name!r}")
        self._known[name] = value

    def find(self, name: str) -> Known:
        """Return the value of a name; None for "".

        Raises:
            OnnxModelError: nothing gave it one.
        """
        if not name:
            return None
        scope: Scope | None = self
        while scope is not None:
            if name in scope._known:
                return scope._known[name]
            scope = scope.outer
        raise OnnxModelError(reason=f"{name!r} is not an input, an initializer or an output of an earlier node")


class Program:
    """Writes one graph: a function of the module that holds the tensors, and of inputs.

    Args:
        outer: the program of the graph around, whose values may be read.
    """

    def __init__(self, outer: Program | None = None) -> None:
        self.outer = outer
        self.graph: fx.Graph = fx.Graph()
        self.modules: dict[str, nn.Module] = {}
        self.maybe_host: set[fx.Node] = set()
        self.captured: dict[fx.Node, fx.Node] = {}
        self._held: dict[str, fx.Node] = {}
        self._inputs = 0
        self.root: fx.Node = self.graph.placeholder("root")
        self._last = self.root

    def placeholder(self, name: str, maybe_host: bool = False) -> fx.Node:
        """One more input, after those that are there."""
        self._inputs += 1
        with self.graph.inserting_after(self._last):
            self._last = self.graph.placeholder(f"{name}_{self._inputs}")
        if maybe_host:
            self.maybe_host.add(self._last)
        return self._last

    def call(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> fx.Node:
        """Return the result of a function of tensors, Hosts and numbers."""
        return self.graph.call_function(function, tuple(args), dict(kwargs or {}))

    def call_module(self, module: nn.Module, args: Sequence[Any]) -> fx.Node:
        """Return the result of a module, which the program keeps."""
        name = f"node_{len(self.modules)}"
        self.modules[name] = module
        return self.graph.call_module(name, tuple(args))

    def local(self, node: fx.Node) -> fx.Node:
        """Return a value of this program, or of one around it, which becomes an input of this one."""
        if node.graph is self.graph:
            return node
        if node not in self.captured:
            assert self.outer is not None
            outside = self.outer.local(node)
            self.captured[node] = self.placeholder("outside", outside in self.outer.maybe_host)
        return self.captured[node]

    def outside(self) -> list[fx.Node]:
        """Return the values that the program around has to give for the captured ones, in order."""
        assert self.outer is not None
        return [self.outer.local(node) for node in self.captured]

    def held(self, path: str) -> fx.Node:
        """Return the attribute of the module under a dotted path."""
        if path in self._held:
            return self._held[path]
        *parents, leaf = path.split(".")
        holder = self.held(".".join(parents)) if parents else self.root
        with self.graph.inserting_after(max(holder, self._last)):
            self._held[path] = self.graph.call_function(_reader_of(leaf), (holder, leaf))
        return self._held[path]

    def insert(self, function: Any, source: fx.Node | None) -> fx.Node:
        """Return the result of a function of something held or given, before all other nodes but that."""
        with self.graph.inserting_after(self._last if source is None else max(source, self._last)):
            return self.graph.call_function(function, () if source is None else (source,))

    def forget(self, placeholder: fx.Node) -> None:
        """Take away an input that nothing reads."""
        if self._last is placeholder:
            self._last = placeholder.prev
        self.graph.erase_node(placeholder)

    def finish(self, outputs: Sequence[Any]) -> fx.GraphModule:
        """Make a module that returns a tuple; it leaves out dead nodes, as ONNX Runtime does."""
        self.graph.output(tuple(outputs))
        for node in reversed(self.graph.nodes):
            if node.op in ("call_function", "call_module") and not node.users:
                self.graph.erase_node(node)
        return fx.GraphModule(dict(self.modules), self.graph)


def _attribute(holder: nn.Module, name: str) -> Any:
    """Return an attribute by its name."""
    return getattr(holder, name)


def _reader_of(name: str) -> Any:
    """Return the function that reads an attribute of this name in FX's code.

    FX writes `getattr(holder, "name")` as `holder.name` if `name.isidentifier()`. That holds for keywords, which cannot
    stand there, and for letters that Python replaces: the wide "w", U+FF57, is "w" there.
    """
    return getattr if name.isascii() and not keyword.iskeyword(name) else _attribute
