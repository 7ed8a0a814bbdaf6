"""Splits one half (forward, backward or inference graph) into islands for ONNX Runtime and nodes that stay in eager.

Every node is one of:

- lowered: an island takes it;
- eager: ONNX Runtime cannot take it, so torch runs it, alone; it carries its reason and is reported;
- drawn: a random draw with no data input (passes/fx/hoist_random), torch's by design;
- host: arithmetic on Python numbers (symbolic sizes), which torch runs for free. A size of a lowered tensor that
  follows from the inputs' sizes is computed from those, so that no island ends for it. So are assertions: an island
  computes the condition, torch reads it and raises.
- write: an input written to (AOTAutograd's `copy_` or `set_` where a graph ends); what stands before it runs before it,
  what follows runs after. The same holds for operators in eager that write to an argument.

Islands are found by levels. A node's level is the greatest number of steps from a lowered node to one that torch
runs, over all paths to it. Each level's lowered nodes form one island, and running torch's nodes of level 0, island
0, torch's nodes of level 1, island 1 … respects every edge. No path can be cut into fewer islands, and the search
takes linear time.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_leaves

from ort_dynamo.errors import FallbackRefusedError
from ort_dynamo.islands import SIZE_READS, cut, free_size_reads
from ort_dynamo.lowering.translate import COND
from ort_dynamo.options import SegmentOptions
from ort_dynamo.passes.analysis.mutation import writes_input
from ort_dynamo.source_line import user_line

__all__ = ["EagerNode", "Segmented", "check_fallback", "segment", "session_device"]

aten = torch.ops.aten


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
        native: overload, as text -> its nodes inside islands.
    """

    gm: GraphModule
    islands: dict[str, GraphModule]
    eager: tuple[EagerNode, ...]
    native: Counter[str]


def segment(gm: GraphModule, refuse: Callable[[Node], str | None], device: torch.device) -> Segmented:
    """Cut `gm` into islands.

    Args:
        gm: a functional ATen graph with fake values in meta["val"].
        refuse: why a call_function node cannot be lowered, or None.
        device: the device of the graph's sessions; nodes on any other stay in eager.
    """
    reasons = _classify(gm.graph, refuse, device)
    lowered = {node for node, reason in reasons.items() if reason is None}
    free = free_size_reads(gm.graph)
    outer, islands = cut(gm, lowered, _levels(gm.graph, reasons, free), free)
    eager = tuple(
        EagerNode(node.name, str(node.target), reason, user_line(node))
        for node, reason in reasons.items()
        if reason not in (None, _HOST, _DRAWN, _WRITE) and node.target is not operator.getitem
    )
    native = Counter(str(node.target) for island in islands.values() for node in _computing(island))
    return Segmented(outer, islands, eager, native)


def _computing(island: GraphModule) -> Iterator[Node]:
    return (n for n in island.graph.nodes if n.op == "call_function" and n.target is not operator.getitem)


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


_ASSERTIONS = (aten._assert_async.default, aten._assert_async.msg, aten._assert_tensor_metadata.default)
_HOST = "host"
_DRAWN = "drawn"
_WRITE = "write"


def _classify(graph: Graph, refuse: Callable[[Node], str | None], device: torch.device) -> dict[Node, str | None]:
    """Node -> None if lowered, else its reason, _HOST, _DRAWN or _WRITE. Placeholders and outputs are absent."""
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
        elif writes_input(node):
            reasons[node] = _WRITE
        elif isinstance(node.target, torch._ops.HigherOrderOperator) and node.target is not COND:
            reasons[node] = f"no lowering for the higher-order operator {node.target}"
        elif node.op != "call_function" or not (isinstance(node.target, torch._ops.OpOverload) or node.target is COND):
            reasons[node] = f"{node.op} of {node.target} is not an ATen operator"
        else:
            reasons[node] = _other_device(node, device) or refuse(node)
    return reasons


def _is_host(node: Node) -> bool:
    """Whether the node computes no tensor: arithmetic on Python numbers alone, and assertions."""
    if node.target in SIZE_READS or node.target in _ASSERTIONS:
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


def _levels(graph: Graph, reasons: dict[Node, str | None], free: Set[Node]) -> dict[Node, int]:
    levels: dict[Node, int] = {}
    last_ordered = 0
    earliest = 0  # the level of the last write
    done = 0  # the level by which all nodes before this one have run
    for node in graph.nodes:
        if node not in reasons or node in free:
            levels[node] = 0
            continue
        lowered = reasons[node] is None
        level = earliest
        for argument in node.all_input_nodes:
            # Within a level, what torch runs comes before the island: only the way back opens a new level.
            opens = not lowered and argument in reasons and reasons[argument] is None
            level = max(level, levels[argument] + opens)
        if not lowered and _is_ordered(node):
            # Effects and draws keep eager's order among themselves.
            last_ordered = level = max(level, last_ordered)
        if reasons[node] == _WRITE or (not lowered and _is_mutable(node)):
            earliest = level = max(level, done)
        done = max(done, level + lowered)
        levels[node] = level
    return levels


def _is_ordered(node: Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return node.op == "call_function" and not _is_host(node) and target is not operator.getitem
    if target.namespace not in ("aten", "prims"):
        return True
    return torch.Tag.nondeterministic_seeded in target.tags or _is_mutable(node)


def _is_mutable(node: Node) -> bool:
    """Whether the operator writes to an argument: no edge says who reads that before, and who afterwards."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
