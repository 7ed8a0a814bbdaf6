"""Builds islands and the outer graph around them, once it is known which nodes go where.

A view is never computed to cross a boundary. The island exports (imports) the base, and the consumer re-makes the
view: torch for free on the outside, ONNX Runtime's Reshape or a fused Transpose on the inside.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ort_dynamo.graph.boundary import copy_with_strides, symbolic_strides
from ort_dynamo.graph.marks import READABLE, SECTION
from ort_dynamo.lowering.symbols import symbols_of
from ort_dynamo.passes.fx.analysis.size_nodes import SizeNodes
from ort_dynamo.passes.fx.analysis.views import is_remakable_view
from ort_dynamo.segment.classify import Place, Placement
from ort_dynamo.torch_internals.aot import views_begin_at_the_input
from ort_dynamo.torch_internals.kernels.operators import OpOverload, aten, is_mutable
from ort_dynamo.torch_internals.sizes.symbols import by_number
from ort_dynamo.torch_internals.tracing.lazy_code import graph_module

__all__ = ["build_islands"]


def build_islands(
    gm: GraphModule, placements: Mapping[Node, Placement], levels: Mapping[Node, int]
) -> tuple[GraphModule, dict[str, GraphModule]]:
    """Build the outer graph and the islands of a graph.

    Args:
        gm: a functional graph.
        placements: the place of each node.
        levels: the level of each node. Each level and section becomes one island.

    Returns:
        The outer graph, with a call_module node per island that returns a tuple, and the islands by name.
    """
    return _Builder(gm, placements, levels).build()


class _Builder:
    def __init__(self, gm: GraphModule, placements: Mapping[Node, Placement], levels: Mapping[Node, int]) -> None:
        def those(place: Place) -> set[Node]:
            return {node for node, placement in placements.items() if placement.place is place}

        self._gm = gm
        self._lowered = those(Place.LOWERED)
        self._input_sizes = those(Place.INPUT_SIZE)
        self._writes = those(Place.WRITE)
        # Who runs a node, and when: sorted, torch's nodes of a level come before its islands, one for each section.
        self._turn = {
            node: (level, lowered := node in self._lowered, node.meta.get(SECTION, 0) if lowered else 0)
            for node, level in levels.items()
        }
        self._outer = Graph()
        self._outside: dict[Node, Node] = {}  # node of gm -> the outer node that holds its value
        self._sizes = SizeNodes(self._outer)
        for node in gm.graph.find_nodes(op="placeholder"):
            self._copy(node)

    def build(self) -> tuple[GraphModule, dict[str, GraphModule]]:
        groups: dict[tuple[int, bool, int], list[Node]] = {}
        for node in self._gm.graph.nodes:
            if node.op not in ("placeholder", "output"):
                groups.setdefault(self._turn[node], []).append(node)
        exports = self._exports()
        islands: dict[str, GraphModule] = {}
        for (_, lowered, _), group in sorted(groups.items(), key=lambda item: item[0]):
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
        return graph_module({**_attributes(self._gm, self._outer), **islands}, self._outer), islands

    # -- values that cross an island boundary ----------------------------------------------------------------------

    def _exports(self) -> set[Node]:
        """Find the lowered nodes whose value must leave their island: bases of values that nodes outside it read."""
        exports: set[Node] = set()
        for reader in self._gm.graph.nodes:
            if reader in self._input_sizes:
                continue
            for value in reader.all_input_nodes:
                if value in self._lowered and self._turn[value] != self._turn[reader]:
                    base, _ = self._base(value)
                    if base in self._lowered:
                        exports.add(base)
        return exports

    def _base(self, value: Node) -> tuple[Node, list[Node]]:
        """Return the node that `value` is a view of, through lowered views only, and those views, outermost first."""
        chain: list[Node] = []
        while self.makes_view(value):
            chain.append(value)
            (value, *_) = value.all_input_nodes
        return value, chain

    def makes_view(self, node: Node) -> bool:
        """Check whether `node` is a view that any island can re-make."""
        return node in self._lowered and is_remakable_view(node)

    # -- the outer graph ---------------------------------------------------------------------------------------

    def _copy(self, node: Node) -> None:
        if node in self._outside:
            return
        if node in self._input_sizes:
            number = self._sizes.number(node.meta["val"])
            assert isinstance(number, Node)
            if READABLE in node.meta:  # which a backward may read it by
                number.meta.setdefault(READABLE, node.meta[READABLE])
            self._outside[node] = number
        else:
            argument = self._contiguous if _needs_contiguous(node) else self._view_outside
            self._outside[node] = copied = self._outer.node_copy(node, argument)
            if symbols_of(node.meta.get("val")).free:
                self._sizes.offer(copied)  # a size that depends on data is nowhere else

    def _make_views_before(self, write: Node) -> None:
        """Rebuild earlier views of an input before `write`, a set_() that gives the input other memory.

        FSDP frees the memory of its parameters after the forward; views of them must stay valid.
        """
        if write not in self._writes or write.target is aten.copy_.default:
            return
        for node in self._gm.graph.nodes:
            if node is write:
                break
            leaves = self.makes_view(node) and any(user not in self._lowered for user in node.users)
            if leaves and self._base(node)[0] is write.args[0]:
                self._view_outside(node)

    def _contiguous(self, value: Node) -> Node:
        """Return the outer node of `value`; a single tensor is contiguous."""
        outside = self._view_outside(value)
        if not isinstance(value.meta.get("val"), torch.Tensor):
            return outside
        made = self._outer.call_function(aten.contiguous.default, (outside,))
        made.meta = dict(value.meta)
        return made

    def _view_outside(self, value: Node) -> Node:
        """Return the outer node of `value`, its views rebuilt on the base if needed."""
        _, chain = self._base(value)
        for view in reversed(chain):
            self._copy(view)
        return self._outside[value]

    def _copied_with_strides(self, item: Node) -> Node:
        """Return a copy of an island's contiguous output with the symbolic strides of its fake value.

        The copy also has the fake value's offset, such as the input's for a scatter into an input. If the input is
        written to, AOTAutograd makes views of it from the sizes, strides and offsets of the views that we return. If
        these offsets count from the input, not from the start of its storage, the copy has no offset.
        """
        fake = item.meta["val"]
        offset = 0 if views_begin_at_the_input() else self._sizes.number(fake.storage_offset())
        strides = [self._sizes.number(stride) for stride in symbolic_strides(fake) or (fake.stride() if offset else ())]
        if not strides or None in strides:
            return item
        copied = self._outer.call_function(copy_with_strides, (item, strides, offset or 0))
        copied.meta = dict(item.meta)
        return copied

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
            self._outside[node] = self._copied_with_strides(item)
        return graph_module(_attributes(self._gm, island.graph), island.graph)

    def _add_sizes(self, island: _Island) -> None:
        """Hand over the size symbols, and rounded sizes, that the island's values mention and no input carries."""
        carried: set[Any] = set()
        mentioned: set[Any] = set()
        rounded: set[Any] = set()
        for node in island.graph.nodes:
            found = symbols_of(node.meta.get("val"))
            mentioned |= found.free
            rounded |= found.rounded
            if node.op == "placeholder":
                carried |= found.whole
        for symbol in (*sorted(mentioned - carried, key=by_number), *sorted(rounded - carried, key=str)):
            if (outside := self._sizes.carrier(symbol)) is not None:
                island.add_size(outside)


class _Island:
    """One island under construction: its graph, and its inputs."""

    def __init__(self, builder: _Builder, group: Iterable[Node]) -> None:
        self.graph = Graph()
        self.imports: list[Node] = []
        self.sizes: list[Node] = []
        self._builder = builder
        self._group = set(group)
        self._inside: dict[Node, Node] = {}
        self._last_placeholder: Node | None = None

    def take(self, value: Node) -> Node:
        """Return the island's node for `value`, with everything it needs, in post-order."""
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
        """Check whether the island holds `node`: its own nodes, views of its inputs, sub-graphs of its operators."""
        return node in self._group or self._builder.makes_view(node) or is_subgraph(node)

    def _import(self, node: Node) -> None:
        self._inside[node] = self._add_placeholder(node.name, node)
        self.imports.append(node)

    def add_size(self, outside: Node) -> None:
        """Import one more scalar, the value of an outer node."""
        self._add_placeholder(f"size_{len(self.sizes)}", outside)
        self.sizes.append(outside)

    def _add_placeholder(self, name: str, source: Node) -> Node:
        last = self._last_placeholder
        with self.graph.inserting_after(last) if last else self.graph.inserting_before():
            self._last_placeholder = made = self.graph.placeholder(name)
        made.meta = dict(source.meta)
        return made


def _needs_contiguous(node: Node) -> bool:
    """Check whether the operator of `node` is tagged to need contiguous tensors."""
    target = node.target
    return (
        isinstance(target, OpOverload) and torch.Tag.needs_contiguous_strides in target.tags and not is_mutable(target)
    )


def _attributes(gm: GraphModule, graph: Graph) -> dict[str, Any]:
    """Return the constants and sub-graphs of `gm` that get_attr nodes of `graph` name."""
    names = {str(node.target) for node in graph.find_nodes(op="get_attr")}
    return {name: operator.attrgetter(name)(gm) for name in names}


def is_subgraph(node: Node) -> bool:
    """Check whether `node` is a graph that a higher-order operator runs."""
    return node.op == "get_attr" and isinstance(node.meta.get("val"), GraphModule)
