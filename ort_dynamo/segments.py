"""Splits one half (forward, backward or inference graph) into islands for ONNX Runtime and nodes that stay in eager.

Every node is one of:

- lowered: an island takes it;
- eager: ONNX Runtime cannot take it, so torch runs it, alone; it carries its reason and is reported;
- drawn: a random draw with no data input (passes/fx/hoist_random), torch's by design;
- host: arithmetic on Python numbers (symbolic sizes), which torch runs for free.

Islands are found by levels. A node's level is the greatest number of steps from a lowered node to one that torch
runs, over all paths to it. Each level's lowered nodes form one island, and running torch's nodes of level 0, island
0, torch's nodes of level 1, island 1 … respects every edge. No path can be cut into fewer islands, and the search
takes linear time.

A view is never computed to cross a boundary. The island exports (imports) the base, and the consumer re-makes the
view: torch for free on the outside, ONNX Runtime's Reshape or a fused Transpose on the inside.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_leaves

from ort_dynamo.errors import FallbackRefusedError
from ort_dynamo.lowering.symbols import symbols_of
from ort_dynamo.lowering.translate import user_line
from ort_dynamo.options import SegmentOptions

__all__ = ["EagerNode", "Segmented", "check_fallback", "segment", "session_device"]

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
    }
)
"""Operators whose output shares the first argument's memory and that torch runs without touching the data."""

MULTI_VIEWS = frozenset(
    {aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int, aten.chunk.default, aten.tensor_split.sections}
)
"""The same with a list of outputs: their getitem nodes are views, too."""


def _is_view(node: Node) -> bool:
    if node.target is operator.getitem:
        return isinstance(node.args[0], Node) and node.args[0].target in MULTI_VIEWS
    return node.target in VIEWS or node.target in MULTI_VIEWS


@dataclass(frozen=True)
class EagerNode:
    """A node that stays in eager.

    Attributes:
        name: the FX node's name.
        target: its overload or function, as text.
        reason: why ONNX Runtime does not take it.
        where: the user's line.
    """

    name: str
    target: str
    reason: str
    where: str


@dataclass(frozen=True)
class Segmented:
    """One half, cut into islands.

    Attributes:
        gm: the outer graph: placeholders, eager nodes, re-made views, and a call_module node per island that returns
            a tuple. Its island submodules are the islands' graphs, to be replaced by what runs them.
        islands: island name (the submodule's) -> its graph.
        eager: the nodes that stay in eager because they must.
        native: number of computing nodes inside islands.
    """

    gm: GraphModule
    islands: dict[str, GraphModule]
    eager: tuple[EagerNode, ...]
    native: int


def segment(gm: GraphModule, refuse: Callable[[Node], str | None], device: torch.device) -> Segmented:
    """Cut `gm` into islands.

    Args:
        gm: a functional ATen graph with fake values in meta["val"].
        refuse: why a call_function node cannot be lowered, or None.
        device: the device of the graph's sessions; nodes on any other stay in eager.
    """
    reasons = _classify(gm.graph, refuse, device)
    levels = _levels(gm.graph, reasons)
    return _Cutter(gm, reasons, levels).cut()


def check_fallback(segmented: Segmented, options: SegmentOptions, role: str) -> None:
    """Raise FallbackRefusedError if nodes stay in eager and the options forbid it."""
    if options.fallback == "error" and segmented.eager:
        lines = "\n".join(f"  {n.name} = {n.target}: {n.reason}\n    {n.where}" for n in segmented.eager)
        raise FallbackRefusedError(count=len(segmented.eager), role=role, nodes=lines)


def session_device(gm: GraphModule) -> torch.device:
    """The device of a graph's sessions: the CUDA device most of its tensors are on if there is one, else the CPU."""
    counts: dict[torch.device, int] = {}
    for node in gm.graph.nodes:
        for fake in tree_leaves(node.meta.get("val")):
            if isinstance(fake, torch.Tensor) and fake.device.type == "cuda":
                counts[fake.device] = counts.get(fake.device, 0) + 1
    return max(counts, key=counts.__getitem__) if counts else torch.device("cpu")


_HOST = "host"
_DRAWN = "drawn"


def _classify(graph: Graph, refuse: Callable[[Node], str | None], device: torch.device) -> dict[Node, str | None]:
    """Node -> None if lowered, else its reason, _HOST or _DRAWN. Placeholders and outputs are absent."""
    reasons: dict[Node, str | None] = {}
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if node.meta.get("ort_dynamo.drawn"):
            reasons[node] = _DRAWN
        elif node.op == "get_attr":
            # A constant tensor, or a sub-graph for a higher-order operator: handed over as it is.
            node.meta.setdefault("val", operator.attrgetter(str(node.target))(graph.owning_module))
            reasons[node] = _HOST
        elif node.target is operator.getitem:
            reasons[node] = reasons.get(node.args[0], _HOST)
        elif _is_host(node):
            reasons[node] = _HOST
        elif node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            reasons[node] = f"{node.op} of {node.target} is not an ATen operator"
        else:
            reasons[node] = _other_device(node, device) or refuse(node)
    return reasons


_SIZE_READS = (
    aten.sym_size.int,
    aten.sym_stride.int,
    aten.sym_numel.default,
    aten.sym_storage_offset.default,
)


def _is_host(node: Node) -> bool:
    """Whether the node computes on Python numbers alone: size arithmetic, and assertions about sizes."""
    if node.target in _SIZE_READS:
        return True
    values = [node.meta.get("val"), *(argument.meta.get("val") for argument in node.all_input_nodes)]
    numbers = (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)
    return any(isinstance(value, numbers) for value in values) and all(
        value is None or isinstance(value, numbers) for value in values
    )


def _other_device(node: Node, device: torch.device) -> str | None:
    tensors = [node.meta.get("val"), *(n.meta.get("val") for n in node.all_input_nodes)]
    for fake in tree_leaves(tensors):
        if isinstance(fake, torch.Tensor) and fake.device != device:
            return f"it has a tensor on {fake.device}, and the graph's sessions are on {device}"
    return None


def _levels(graph: Graph, reasons: dict[Node, str | None]) -> dict[Node, int]:
    levels: dict[Node, int] = {}
    last_ordered = 0
    for node in graph.nodes:
        if node not in reasons:
            levels[node] = 0
            continue
        lowered = reasons[node] is None
        level = 0
        for argument in node.all_input_nodes:
            # Within a level, what torch runs comes before the island: only the way back opens a new level.
            opens = not lowered and argument in reasons and reasons[argument] is None
            level = max(level, levels[argument] + opens)
        if not lowered and _is_ordered(node):
            # Effects and draws keep eager's order among themselves.
            last_ordered = level = max(level, last_ordered)
        levels[node] = level
    return levels


def _is_ordered(node: Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return node.op == "call_function" and not _is_host(node) and target is not operator.getitem
    if target.namespace not in ("aten", "prims"):
        return True
    return torch.Tag.nondeterministic_seeded in target.tags or target._schema.is_mutable


class _Cutter:
    """Builds the outer graph and the islands."""

    def __init__(self, gm: GraphModule, reasons: dict[Node, str | None], levels: dict[Node, int]) -> None:
        self._gm = gm
        self._reasons = reasons
        self._levels = levels
        self._outer = Graph()
        self._outside: dict[Node, Node] = {}  # node of gm -> the outer node that holds its value
        self._sizes: dict[Any, Node] = {}  # sympy expression -> outer node that holds the number

    def cut(self) -> Segmented:
        nodes = list(self._gm.graph.nodes)
        for node in nodes:
            if node.op == "placeholder":
                self._copy(node)
        for node in nodes:
            if node.op == "placeholder":
                self._offer_sizes(node)
        (output,) = (node for node in nodes if node.op == "output")
        groups: dict[tuple[int, bool], list[Node]] = {}
        for node, reason in self._reasons.items():
            groups.setdefault((self._levels[node], reason is None), []).append(node)
        exports = self._exports(output)
        islands: dict[str, GraphModule] = {}
        for (_, lowered), group in sorted(groups.items(), key=lambda item: item[0]):
            if not lowered:
                for node in group:
                    self._copy(node)
            elif wanted := [node for node in group if node in exports]:
                name = f"island_{len(islands)}"
                islands[name] = self._cut_island(name, group, wanted)
        self._outer.output(torch.fx.node.map_arg(output.args[0], self._view_outside))
        outer = GraphModule({**_attributes(self._gm), **islands}, self._outer)
        eager = tuple(
            EagerNode(node.name, str(node.target), reason, user_line(node))
            for node, reason in self._reasons.items()
            if reason not in (None, _HOST, _DRAWN) and node.target is not operator.getitem
        )
        native = sum(
            1
            for island in islands.values()
            for node in island.graph.nodes
            if node.op == "call_function" and node.target is not operator.getitem
        )
        return Segmented(outer, islands, eager, native)

    # -- what crosses ------------------------------------------------------------------------------------------

    def _exports(self, output: Node) -> set[Node]:
        """Lowered nodes whose value must leave their island: bases of what anybody outside reads."""
        exports: set[Node] = set()
        for reader in [*self._reasons, output]:
            for value in reader.all_input_nodes:
                outside = reader is output or self._reasons[reader] is not None
                if self.is_lowered(value) and (outside or self._levels[value] != self._levels[reader]):
                    base, _ = self._base(value)
                    if self.is_lowered(base):
                        exports.add(base)
        return exports

    def _base(self, value: Node) -> tuple[Node, list[Node]]:
        """The node that `value` is a view of, through lowered views only, and those views, outermost first."""
        chain: list[Node] = []
        while self.is_lowered(value) and _is_view(value):
            chain.append(value)
            (value, *_) = value.all_input_nodes
        return value, chain

    def is_lowered(self, node: Node) -> bool:
        """Whether an island computes `node`."""
        return node in self._reasons and self._reasons[node] is None

    # -- the outer graph ---------------------------------------------------------------------------------------

    def _copy(self, node: Node) -> None:
        if node not in self._outside:
            self._outside[node] = self._outer.node_copy(node, self._view_outside)

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
            self._outside[node] = item
        return GraphModule(torch.nn.Module(), island.graph)

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
        """Whether the island computes `node`: its own, and views of what it imports."""
        return node in self._group or (self._cutter.is_lowered(node) and _is_view(node))

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


def _attributes(gm: GraphModule) -> dict[str, Any]:
    """The constants and sub-graphs that get_attr nodes of `gm` name."""
    names = {str(node.target) for node in gm.graph.find_nodes(op="get_attr")}
    return {name: operator.attrgetter(name)(gm) for name in names}
