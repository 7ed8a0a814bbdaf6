"""Decide where each node of a forward, backward or inference graph runs, and why.

A size of a lowered tensor that follows from the inputs' sizes is computed from those, so that no island ends for it. An
assertion is torch's as well: an island computes the condition, torch reads it and raises.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Set
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
from torch.fx import Graph, Node

from ort_dynamo.graph.marks import CHOSEN, LACKED_SYMBOLS, OBSERVERS, RANDOM
from ort_dynamo.lowering.registry import find_lowering
from ort_dynamo.lowering.symbols import symbols_of
from ort_dynamo.lowering.translate import COND
from ort_dynamo.passes.fx.analysis.mutation import writes_input
from ort_dynamo.passes.fx.analysis.saved_tensors import is_random
from ort_dynamo.program.progress import counted
from ort_dynamo.torch_internals.fakes import fakes_around
from ort_dynamo.torch_internals.kernels.operators import HigherOrderOperator, OpOverload, aten, is_collective
from ort_dynamo.torch_internals.sizes.symbols import given_expression

__all__ = ["Place", "Placement", "classify"]


class Place(Enum):
    """The runtime of a node, torch or ONNX Runtime, and the kind of reason."""

    LOWERED = auto()
    """An island takes it."""
    EAGER = auto()
    """ONNX Runtime cannot take it, so torch runs it, alone; it has a reason and is reported."""
    CHOSEN = auto()
    """An island could take it, and torch runs it faster (passes/fx/torch_graph/place_in_torch.py); it has a reason."""
    RANDOM = auto()
    """A random op, torch's by design: with no data input (passes/fx/hoist_random), or one that reads tensors and has no
    lowering."""
    COLLECTIVE = auto()
    """Communication with other processes, or the wait for it: torch's by design, as the process group is torch's."""
    OBSERVER = auto()
    """An observer that gives a value to Python (statistics of activations): torch's by design."""
    HOST = auto()
    """Arithmetic on Python scalars (symbolic sizes), an assertion or a constant, which torch has for free."""
    INPUT_SIZE = auto()
    """A size of a computed tensor that follows from the sizes of the graph's inputs, so no island waits for it."""
    WRITE = auto()
    """An input written to: all nodes before it run before it, all nodes after it run after."""


@dataclass(frozen=True)
class Placement:
    """The place of one node, and the reason.

    Attributes:
        place: who runs it.
        reason: EAGER: why ONNX Runtime cannot run it; CHOSEN: why torch is faster; else None.
    """

    place: Place
    reason: str | None = None


def classify(graph: Graph, refuse: Callable[[Node], str | None], device: torch.device) -> dict[Node, Placement]:
    """Place every node but placeholders and the output; a constant becomes the meta["val"] of its node.

    Args:
        graph: a functional ATen graph with fake values in meta["val"].
        refuse: why a call_function node cannot be lowered, or None.
        device: the device of the graph's sessions; nodes on other devices are fallbacks.
    """
    carried: set[Any] = set()
    for node in graph.find_nodes(op="placeholder"):
        carried |= symbols_of(node.meta.get("val")).whole
    readable = set(carried)
    placements: dict[Node, Placement] = {}
    for node in counted(graph.nodes, "choosing where operators run"):
        if node.op == "get_attr":
            # A constant tensor, or a subgraph for a higher-order operator: passed on unchanged.
            node.meta.setdefault("val", operator.attrgetter(str(node.target))(graph.owning_module))
        if node.target is operator.getitem:
            placements[node] = placements.get(node.args[0], Placement(Place.HOST))
        elif node.op not in ("placeholder", "output"):
            node.meta.pop(LACKED_SYMBOLS, None)  # that of an earlier cut
            if lacked := _symbols_around(node) - readable:
                node.meta[LACKED_SYMBOLS] = lacked
            placements[node] = _placement(node, carried, refuse, device)
        if node in placements and placements[node].place is not Place.LOWERED:
            readable |= symbols_of(node.meta.get("val")).whole
    return placements


def _placement(node: Node, carried: Set[Any], refuse: Callable[[Node], str | None], device: torch.device) -> Placement:
    """Place one node; `carried` are the size symbols that the graph's inputs carry."""
    place = _without_trial(node, carried)
    if place is Place.CHOSEN:
        return Placement(place, node.meta[CHOSEN])
    if place is not None:
        return Placement(place)
    if (reason := _other_kind(node) or _other_device(node, device)) is not None:
        return Placement(Place.EAGER, reason)
    if (reason := refuse(node)) is None:
        return Placement(Place.LOWERED)
    return Placement(Place.RANDOM) if _only_torch_draws(node) else Placement(Place.EAGER, reason)


def _only_torch_draws(node: Node) -> bool:
    """Check whether `node` is a random op for which no lowering is registered."""
    return isinstance(node.target, OpOverload) and is_random(node) and find_lowering(node.target) is None


def _symbols_around(node: Node) -> Set[Any]:
    """Return the size symbols of a node's result and of its arguments."""
    return symbols_of([one.meta.get("val") for one in (node, *node.all_input_nodes)]).free


_SIZE_READS = frozenset(
    {aten.sym_size.int, aten.sym_stride.int, aten.sym_numel.default, aten.sym_storage_offset.default}
)
"""Operators that ask a tensor for a scalar, not for its data."""

_ASSERTIONS = (aten._assert_async.default, aten._assert_async.msg, aten._assert_tensor_metadata.default)


def _without_trial(node: Node, carried: Set[Any]) -> Place | None:
    """Return the place of a node that torch runs even if it can be lowered, or None."""
    if node.meta.get(RANDOM):
        return Place.RANDOM
    if is_collective(node.target):
        return Place.COLLECTIVE
    if isinstance(node.target, OpOverload) and node.target.namespace == OBSERVERS:
        return Place.OBSERVER
    if _follows_from_inputs(node, carried):
        return Place.INPUT_SIZE
    if node.op == "get_attr" or _is_host(node):
        return Place.HOST
    if writes_input(node):
        return Place.WRITE
    return Place.CHOSEN if CHOSEN in node.meta else None


def _follows_from_inputs(node: Node, carried: Set[Any]) -> bool:
    """Check whether `node` reads a size of a computed tensor that has only symbols which inputs carry."""
    return bool(
        node.target in _SIZE_READS
        and node.all_input_nodes[0].op != "placeholder"
        and isinstance(size := node.meta.get("val"), torch.SymInt)
        and given_expression(size).free_symbols
        and given_expression(size).free_symbols <= carried
    )


def _is_host(node: Node) -> bool:
    """Check whether the node computes no tensor: it is arithmetic on Python scalars alone, or an assertion."""
    if node.target in _SIZE_READS or node.target in _ASSERTIONS:
        return True
    values = [node.meta.get("val"), *(argument.meta.get("val") for argument in node.all_input_nodes)]
    numbers = (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)
    return any(isinstance(value, numbers) for value in values) and all(
        value is None or isinstance(value, numbers) for value in values
    )


def _other_kind(node: Node) -> str | None:
    """Return the reason of a node that calls no ATen operator, nor the higher-order operator that has a lowering."""
    if isinstance(node.target, HigherOrderOperator) and node.target is not COND:
        return f"no lowering for the higher-order operator {node.target}"
    if node.op != "call_function" or not (isinstance(node.target, OpOverload) or node.target is COND):
        return f"{node.op} of {node.target} is not an ATen operator"
    return None


def _other_device(node: Node, device: torch.device) -> str | None:
    for fake in fakes_around(node):
        if fake.device.type == "meta":
            return "it has a tensor on meta, which holds no data: move the model and its inputs to a device"
        if fake.device != device:
            return f"it has a tensor on {fake.device}, and the graph's sessions are on {device}"
    return None
