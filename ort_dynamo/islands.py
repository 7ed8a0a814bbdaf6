"""Builds islands and the outer graph around them, once it is known which nodes go where.

A view is never computed to cross a boundary. The island exports (imports) the base, and the consumer re-makes the
view: torch for free on the outside, ONNX Runtime's Reshape or a fused Transpose on the inside.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.proxy import GraphAppendingTracer
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from ort_dynamo.boundary import laid_out, symbolic_strides
from ort_dynamo.lowering.symbols import symbols_of
from ort_dynamo.passes.analysis.mutation import writes_input

__all__ = ["MULTI_VIEWS", "SIZE_READS", "VIEWS", "cut", "free_size_reads", "is_view"]

aten = torch.ops.aten

VIEWS = frozenset(
    {
        aten.view.default,
        aten._unsafe_view.default,
        aten.permute.default,
        aten.transpose.int,
        aten.t.default,
        aten.expand.default,
        aten.unsqueeze.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.slice.Tensor,
        aten.select.int,
        aten.alias.default,
        aten.detach.default,
        aten.diagonal.default,
        aten.unfold.default,
        aten.as_strided.default,
    }
)
"""Operators whose output shares the first argument's memory and that torch runs without touching the data."""

MULTI_VIEWS = frozenset(
    {
        aten.split.Tensor,
        aten.split_with_sizes.default,
        aten.unsafe_split.Tensor,
        aten.unsafe_split_with_sizes.default,
        aten.unbind.int,
        aten.chunk.default,
        aten.tensor_split.sections,
    }
)
"""The same with a list of outputs: their getitem nodes are views, too."""


SIZE_READS = frozenset(
    {aten.sym_size.int, aten.sym_stride.int, aten.sym_numel.default, aten.sym_storage_offset.default}
)
"""Operators that ask a tensor for a number, not for its data."""


def free_size_reads(graph: Graph) -> set[Node]:
    """Reads of a size of a computed tensor that follows from the sizes of the graph's inputs: nobody has to wait."""
    carried: set[Any] = set()
    for node in graph.find_nodes(op="placeholder"):
        carried |= symbols_of(node.meta.get("val")).whole
    return {
        node
        for node in graph.nodes
        if node.target in SIZE_READS
        and node.all_input_nodes[0].op != "placeholder"
        and isinstance(size := node.meta.get("val"), torch.SymInt)
        and size.node.expr.free_symbols
        and size.node.expr.free_symbols <= carried
    }


class _Arithmetic(PythonReferenceAnalysis):
    """torch's arithmetic on Python numbers, for proxies of them also where torch's asks sympy or `math`."""

    @staticmethod
    def int_truediv(a: Any, b: Any) -> Any:
        return a / b

    @staticmethod
    def ceil_to_int(x: Any, dtype: torch.dtype) -> Any:
        return _applied(math.ceil, x)

    @staticmethod
    def floor_to_int(x: Any, dtype: torch.dtype) -> Any:
        return _applied(math.floor, x)

    @staticmethod
    def trunc_to_int(x: Any, dtype: torch.dtype) -> Any:
        return _applied(math.trunc, x)


def _applied(function: Callable[[Any], int], x: Any) -> Any:
    return x.tracer.create_proxy("call_function", function, (x,), {}) if isinstance(x, torch.fx.Proxy) else function(x)


def is_view(node: Node) -> bool:
    """Whether `node` is a view of its first argument, or one of the views that a MULTI_VIEWS node gives."""
    if node.target is operator.getitem:
        return isinstance(node.args[0], Node) and node.args[0].target in MULTI_VIEWS
    return node.target in VIEWS or node.target in MULTI_VIEWS


def cut(
    gm: GraphModule, lowered: Set[Node], levels: Mapping[Node, int], free: Set[Node]
) -> tuple[GraphModule, dict[str, GraphModule]]:
    """The outer graph and the islands of a graph.

    Args:
        gm: a functional graph.
        lowered: the nodes that go into islands.
        levels: the level of every node; see segments.py.
        free: what `free_size_reads` found.

    Returns:
        The outer graph, with a call_module node per island that returns a tuple, and the islands by name.
    """
    return _Cutter(gm, lowered, levels, free).cut()


class _Cutter:
    def __init__(self, gm: GraphModule, lowered: Set[Node], levels: Mapping[Node, int], free: Set[Node]) -> None:
        self._gm = gm
        self._free = free
        self._lowered = lowered
        self._levels = levels
        self._outer = Graph()
        self._tracer = GraphAppendingTracer(self._outer)  # one for all: operators of two proxies ask for that
        self._outside: dict[Node, Node] = {}  # node of gm -> the outer node that holds its value
        self._sizes: dict[Any, Node] = {}  # sympy expression -> outer node that holds the number

    def cut(self) -> tuple[GraphModule, dict[str, GraphModule]]:
        groups: dict[tuple[int, bool], list[Node]] = {}
        for node in self._gm.graph.nodes:
            if node.op == "placeholder":
                self._copy(node)
                self._offer_sizes(node)
            elif node.op != "output":
                groups.setdefault((self._levels[node], node in self._lowered), []).append(node)
        exports = self._exports()
        islands: dict[str, GraphModule] = {}
        for (_, lowered), group in sorted(groups.items(), key=lambda item: item[0]):
            if not lowered:
                for node in group:
                    if not (is_subgraph(node) and all(user in self._lowered for user in node.users)):
                        self._make_views_before(node)
                        self._copy(node)
            elif wanted := [node for node in group if node in exports]:
                name = f"island_{len(islands)}"
                islands[name] = self._cut_island(name, group, wanted)
        (output,) = self._gm.graph.find_nodes(op="output")
        self._outer.output(torch.fx.node.map_arg(output.args[0], self._view_outside))
        return GraphModule({**_attributes(self._gm, self._outer), **islands}, self._outer), islands

    # -- what crosses ------------------------------------------------------------------------------------------

    def _exports(self) -> set[Node]:
        """Lowered nodes whose value must leave their island: bases of what anybody outside reads."""
        exports: set[Node] = set()
        for reader in self._gm.graph.nodes:
            if reader in self._free:
                continue
            for value in reader.all_input_nodes:
                outside = reader not in self._lowered or self._levels[value] != self._levels[reader]
                if outside and value in self._lowered:
                    base, _ = self._base(value)
                    if base in self._lowered:
                        exports.add(base)
        return exports

    def _base(self, value: Node) -> tuple[Node, list[Node]]:
        """The node that `value` is a view of, through lowered views only, and those views, outermost first."""
        chain: list[Node] = []
        while self.makes_view(value):
            chain.append(value)
            (value, *_) = value.all_input_nodes
        return value, chain

    def makes_view(self, node: Node) -> bool:
        """Whether `node` is a view that any island can re-make."""
        return node in self._lowered and is_view(node)

    # -- the outer graph ---------------------------------------------------------------------------------------

    def _copy(self, node: Node) -> None:
        if node in self._outside:
            return
        if node in self._free:
            number = self._number(node.meta["val"])
            assert isinstance(number, Node)
            self._outside[node] = number
        else:
            argument = self._contiguous if _needs_contiguous(node) else self._view_outside
            self._outside[node] = self._outer.node_copy(node, argument)

    def _make_views_before(self, write: Node) -> None:
        """Re-make, where `write` gives an input other memory, the views of that input that stand before it.

        As FSDP does with its parameters, whose memory goes when the forward has run: their views stay valid.
        """
        if not writes_input(write) or write.target is aten.copy_.default:
            return
        for node in self._gm.graph.nodes:
            if node is write:
                break
            leaves = self.makes_view(node) and any(user not in self._lowered for user in node.users)
            if leaves and self._base(node)[0] is write.args[0]:
                self._view_outside(node)

    def _contiguous(self, value: Node) -> Node:
        """The outer node of `value`, as a contiguous tensor where it is one tensor."""
        outside = self._view_outside(value)
        if not isinstance(value.meta.get("val"), torch.Tensor):
            return outside
        made = self._outer.call_function(aten.contiguous.default, (outside,))
        made.meta = dict(value.meta)
        return made

    def _view_outside(self, value: Node) -> Node:
        """The outer node of `value`, its views re-made on the base if needed."""
        _, chain = self._base(value)
        for view in reversed(chain):
            self._copy(view)
        return self._outside[value]

    def _offer_sizes(self, placeholder: Node) -> None:
        fake = placeholder.meta.get("val")
        if isinstance(fake, torch.SymInt):
            self._sizes.setdefault(fake.node.expr, self._outside[placeholder])

    def _laid_out(self, item: Node) -> Node:
        """A copy of what comes contiguous out of an island in the symbolic strides that its fake value promises.

        And at its offset: a scatter into an input has the input's. Where the input is written to, AOTAutograd makes
        views of it from the sizes, strides and offsets of the views of what is written that we return.
        """
        fake = item.meta["val"]
        offset = self._number(fake.storage_offset())
        strides = [self._number(stride) for stride in symbolic_strides(fake) or (fake.stride() if offset else ())]
        if not strides or None in strides:
            return item
        copied = self._outer.call_function(laid_out, (item, strides, offset or 0))
        copied.meta = dict(item.meta)
        return copied

    def _number(self, size: int | torch.SymInt) -> int | Node | None:
        """The number, or an outer node that computes it; None where no placeholder carries one of its symbols."""
        if not isinstance(size, torch.SymInt):
            return size
        if size.node.expr in self._sizes:
            return self._sizes[size.node.expr]
        nodes = {symbol: self._size_outside(symbol) for symbol in size.node.expr.free_symbols}
        symbols = {symbol: torch.fx.Proxy(node, self._tracer) for symbol, node in nodes.items() if node is not None}
        if len(symbols) < len(nodes):
            return None
        made = sympy_interp(_Arithmetic, symbols, size.node.expr)
        if not isinstance(made, torch.fx.Proxy):
            return int(made)
        made.node.meta["val"] = size
        self._sizes[size.node.expr] = made.node
        return made.node

    def _size_outside(self, symbol: Any) -> Node | None:
        """An outer node that holds the number `symbol`: a placeholder, or read from a tensor placeholder's shape."""
        if symbol in self._sizes:
            return self._sizes[symbol]
        for node in self._outer.find_nodes(op="placeholder"):
            fake = node.meta.get("val")
            if not isinstance(fake, torch.Tensor):
                continue
            for axis, size in enumerate(fake.shape):
                if isinstance(size, torch.SymInt) and size.node.expr == symbol:
                    self._sizes[symbol] = made = self._outer.call_function(aten.sym_size.int, (node, axis))
                    made.meta["val"] = size
                    return made
        return None

    # -- islands -----------------------------------------------------------------------------------------------

    def _cut_island(self, name: str, group: list[Node], exports: list[Node]) -> GraphModule:
        island = _Island(self, group)
        inner_outputs = [island.take(node) for node in exports]
        self._add_sizes(island)
        island.graph.output(tuple(inner_outputs))
        inputs = (*map(self._view_outside, island.imports), *island.sizes)
        call = self._outer.call_module(name, inputs)
        for index, node in enumerate(exports):
            item = self._outer.call_function(operator.getitem, (call, index))
            item.meta = dict(node.meta)
            self._outside[node] = self._laid_out(item)
        return GraphModule(_attributes(self._gm, island.graph), island.graph)

    def _add_sizes(self, island: _Island) -> None:
        """Hand over the size symbols that the island's values mention and none of its inputs carries."""
        carried: set[Any] = set()
        mentioned: set[Any] = set()
        for node in island.graph.nodes:
            found = symbols_of(node.meta.get("val"))
            mentioned |= found.free
            if node.op == "placeholder":
                carried |= found.whole
        for symbol in sorted(mentioned - carried, key=str):
            if (outside := self._size_outside(symbol)) is not None:
                island.add_size(outside)


class _Island:
    """One island under construction: its graph, and what it imports."""

    def __init__(self, cutter: _Cutter, group: Iterable[Node]) -> None:
        self.graph = Graph()
        self.imports: list[Node] = []
        self.sizes: list[Node] = []
        self._cutter = cutter
        self._group = set(group)
        self._inside: dict[Node, Node] = {}
        self._last_placeholder: Node | None = None

    def take(self, value: Node) -> Node:
        """The island's node for `value`, with everything it needs, in post-order."""
        stack = [value]
        while stack:
            node = stack[-1]
            if node in self._inside:
                stack.pop()
                continue
            if not self._belongs(node):
                self._import(node)
                stack.pop()
                continue
            missing = [n for n in node.all_input_nodes if n not in self._inside]
            if missing:
                stack.extend(reversed(missing))
            else:
                self._inside[node] = self.graph.node_copy(node, self._inside.__getitem__)
                stack.pop()
        return self._inside[value]

    def _belongs(self, node: Node) -> bool:
        """Whether the island holds `node`: its own, views of what it imports, and sub-graphs of its operators."""
        return node in self._group or self._cutter.makes_view(node) or is_subgraph(node)

    def _import(self, node: Node) -> None:
        self._inside[node] = self._add_placeholder(node.name, node)
        self.imports.append(node)

    def add_size(self, outside: Node) -> None:
        """Import one more number, the value of an outer node."""
        self._add_placeholder(f"size_{len(self.sizes)}", outside)
        self.sizes.append(outside)

    def _add_placeholder(self, name: str, source: Node) -> Node:
        last = self._last_placeholder
        with self.graph.inserting_after(last) if last else self.graph.inserting_before():
            self._last_placeholder = made = self.graph.placeholder(name)
        made.meta = dict(source.meta)
        return made


def _needs_contiguous(node: Node) -> bool:
    """Whether the operator of `node` says that a compiler has to hand it contiguous tensors."""
    target = node.target
    return (
        isinstance(target, torch._ops.OpOverload)
        and torch.Tag.needs_contiguous_strides in target.tags
        and not target._schema.is_mutable
    )


def _attributes(gm: GraphModule, graph: Graph) -> dict[str, Any]:
    """The constants and sub-graphs of `gm` that get_attr nodes of `graph` name."""
    names = {str(node.target) for node in graph.find_nodes(op="get_attr")}
    return {name: operator.attrgetter(name)(gm) for name in names}


def is_subgraph(node: Node) -> bool:
    """Whether `node` is a graph that a higher-order operator runs."""
    return node.op == "get_attr" and isinstance(node.meta.get("val"), GraphModule)
