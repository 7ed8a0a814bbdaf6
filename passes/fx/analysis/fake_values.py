"""Fake values of nodes, propagated from their inputs: the one place that writes meta["val"].

Passes change calls and add nodes. `FakeValues.update` then computes the values of changed nodes and of all nodes that
depend on them. It keeps a value if the new one has the same dtype, shape, strides, offset and device, and aliases the
same nodes. So a change propagates only as far as it has effects, and passes may compare values by identity.

torch has a similar class for its own compiler (`torch._inductor.fx_utils.FakeTensorUpdater`). This one does not import
that compiler, keeps unbacked symbols bound, and supports our nodes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from ort_dynamo.graph.boundary import has_strides
from ort_dynamo.graph.marks import CHANNELS_LAST, READS_WIDE_STATISTICS, WIDE_STATISTICS
from ort_dynamo.passes.fx.analysis.aliases import aliased_inputs
from ort_dynamo.passes.fx.analysis.storage import fakes_in
from ort_dynamo.torch_internals.fakes import FakeTensor, storage_identity
from ort_dynamo.torch_internals.kernels.dispatcher import as_traced
from ort_dynamo.torch_internals.kernels.operators import (
    HigherOrderOperator,
    OpOverload,
    aten,
    schema_of,
    written_argument,
)
from ort_dynamo.torch_internals.kernels.promotion import is_contiguous
from ort_dynamo.torch_internals.kernels.view_operators import RESHAPES
from ort_dynamo.torch_internals.pytree import tree_leaves
from ort_dynamo.torch_internals.sizes.symbols import given_expression, is_empty, known_equal, known_true

__all__ = [
    "FakeValues",
    "add_call",
    "caller_layout",
    "derived_meta",
    "differences",
    "looks_same",
    "propagate",
    "separate_memory",
]


def add_call(
    graph: Graph,
    target: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    meta: Mapping[str, Any] | None = None,
) -> Node:
    """Add a call where the graph inserts, with the fake value that it gives.

    Args:
        graph: the graph.
        target: an operator, or a function of scalars.
        args: its arguments.
        kwargs: its keyword arguments.
        meta: further entries of the node's meta.
    """
    made = graph.call_function(target, args, dict(kwargs or {}))
    made.meta.update(meta or {})
    propagate([made])
    return made


def derived_meta(node: Node) -> dict[str, Any]:
    """Give the meta of a call that is part of a node: all of the node's meta but its value."""
    return {key: value for key, value in node.meta.items() if key not in ("val", "tensor_meta")}


def propagate(nodes: Iterable[Node]) -> None:
    """Compute the fake values of nodes, in the order given, from those of their arguments."""
    nodes = list(nodes)
    with _fake_mode(itertools.chain.from_iterable((*one.all_input_nodes, *one.graph.nodes) for one in nodes)):
        for node in filter(_is_propagated, nodes):
            node.meta["val"] = _as_symbol(_result(node), node.meta.get("val"))


def _as_symbol(value: Any, traced: Any) -> Any:
    """Keep a number that the trace gave as a symbol, and has found the value of since.

    A partitioner takes a plain number for a tensor.
    """
    is_found = isinstance(traced, _SYMBOLS) and isinstance(value, (bool, int, float))
    return traced if is_found and _same_number(traced, value) else value


class FakeValues:
    """Keeps the fake values of a graph in step with its calls.

    Args:
        gm: a graph whose fake values follow from its calls.
    """

    def __init__(self, gm: GraphModule) -> None:
        self._gm = gm
        self._note()

    def _note(self) -> None:
        self._calls = {node: _call(node) for node in self._gm.graph.nodes}
        self._values = {node: node.meta.get("val") for node in self._gm.graph.nodes}

    def update(self, stale: Collection[Node] = ()) -> None:
        """Propagate the values of nodes that are new, call something else than at the last update, or are `stale`."""
        made: dict[int, Node] = {}  # allocation -> the first node that lives in it
        replaced: set[Node] = set()
        with _fake_mode(self._gm.graph.nodes):
            for node in self._gm.graph.nodes:
                changed = node in stale or self._calls.get(node) != _call(node)
                if node.meta.get("val") is not self._values.get(node):  # the pass has propagated it
                    replaced.add(node)
                stays = not changed and replaced.isdisjoint(node.all_input_nodes)
                if not stays and _is_propagated(node) and not _is_contiguous_view(node):
                    value = _result(node)
                    if "val" not in node.meta or not _same(node.meta["val"], value, made):
                        node.meta["val"] = value
                        replaced.add(node)
                for fake in fakes_in(node.meta.get("val")):
                    made.setdefault(storage_identity(fake), node)
        self._note()


def separate_memory(gm: GraphModule) -> None:
    """Give nodes that compute their values new memory, if their fake values are in that of another node.

    A partitioner copies fake values. If the forward saves one result of a node that the backward recomputes, both have
    fake values in the same memory.
    """
    stale: set[Node] = set()
    seen: set[int] = set()
    for node in gm.graph.nodes:
        own = {storage_identity(fake) for fake in fakes_in(node.meta.get("val"))}
        if node.op == "call_function" and not aliased_inputs(node) and own & seen:
            stale.add(node)
        seen |= own
    if stale:
        FakeValues(gm).update(stale)


def differences(gm: GraphModule) -> Iterator[str]:
    """Propagate all values from the inputs, and list the differences from the graph's values.

    Both have to agree in dtype, shape, strides and device, in aliases, and in offsets. The offset of a value that
    aliases nothing does not matter: torch traces a copy into a slice with the slice's offset. Nor do the aliases of an
    empty value: torch traces some as views, and copies them in a later call.
    """
    anew: dict[Node, Any] = {}
    memory: tuple[dict[int, int], dict[int, int]] = {}, {}  # allocation, old and new -> an index
    with _fake_mode(gm.graph.nodes):
        for index, node in enumerate(gm.graph.nodes):
            if not _is_propagated(node):
                anew[node] = node.meta.get("val")
                for fake in fakes_in(anew[node]):
                    place = storage_identity(fake)
                    memory[1][place] = memory[0].setdefault(place, index)
                continue
            old, new = node.meta.get("val"), _result(node, anew)
            anew[node] = new
            if "val" not in node.meta:
                continue
            if not _agree(old, new, offsets=bool(aliased_inputs(node))):
                yield f"{node.format_node()} has the value {_described(old)}, and its call gives {_described(new)}"
                anew[node] = old
                continue
            for fakes in zip(fakes_in(old), fakes_in(new), strict=True):
                if is_empty(fakes[0].shape):
                    continue
                first, second = (
                    known.setdefault(storage_identity(fake), index) for known, fake in zip(memory, fakes, strict=True)
                )
                if first != second:
                    nodes = list(gm.graph.nodes)
                    yield f"{node.format_node()} has a value in the memory of {nodes[first]}, not of {nodes[second]}"


def _call(node: Node) -> tuple[Any, ...]:
    return node.target, node.args, node.kwargs, node.meta.get(WIDE_STATISTICS), node.meta.get(CHANNELS_LAST)


_RESIZE = ("set_", "resize_", "resize_as_", "resize_storage_bytes_")
"""Operators that would change the fake value of an input, whose memory they replace."""


def _is_propagated(node: Node) -> bool:
    """Check whether a node's fake value follows from its call.

    An island's, a higher-order operator's and that of a function with `keeps_value` are given by who made the node. A
    symbol that depends on data is bound to the value that the trace gave.
    """
    target: Any = node.target
    if node.op != "call_function" or "unbacked_bindings" in node.meta or getattr(target, "keeps_value", False):
        return False
    if isinstance(target, HigherOrderOperator):
        return False
    if isinstance(target, OpOverload) and schema_of(target).name.rpartition("::")[2] in _RESIZE:
        return False
    return all("val" in one.meta for one in node.all_input_nodes)


def _result(node: Node, values: Mapping[Node, Any] | None = None) -> Any:
    """Call a node's target with the fake values of its arguments: those of the graph, or of `values`."""
    target: Any = node.target
    given: Any = map_arg((node.args, node.kwargs), lambda one: one.meta["val"] if values is None else values[one])
    args, kwargs = given
    if isinstance(target, OpOverload) and (place := written_argument(target)) is not None:
        index, name = place  # of an input, memory is all that changes
        return args[index] if index < len(args) else kwargs[name]
    narrow: Mapping[int, torch.dtype] = node.meta.get(READS_WIDE_STATISTICS, {})
    args = tuple(one.to(narrow[index]) if index in narrow else one for index, one in enumerate(args))
    result = _in_channels_last(target(*args, **kwargs), node.meta.get(CHANNELS_LAST, frozenset()))
    wide: Mapping[int, torch.dtype] = node.meta.get(WIDE_STATISTICS, {})
    return tuple(one.to(wide.get(index, one.dtype)) for index, one in enumerate(result)) if wide else result


def _in_channels_last(result: Any, indices: Collection[int]) -> Any:
    """Give results of these indices the strides of channels_last; the only result has index 0."""
    if isinstance(result, torch.Tensor):
        return aten.clone.default(result, memory_format=torch.channels_last) if indices else result
    if not indices:
        return result
    converted = (_in_channels_last(one, [0] if index in indices else []) for index, one in enumerate(result))
    return type(result)(converted)


@contextmanager
def _fake_mode(nodes: Iterable[Node]) -> Iterator[None]:
    """Compute as the trace did; a graph without fake tensors computes with the values that it has."""
    fakes = (fake for node in nodes for fake in fakes_in(node.meta.get("val")) if isinstance(fake, FakeTensor))
    first = next(fakes, None)
    with nullcontext() if first is None else first.fake_mode, as_traced():
        yield


def _agree(old: Any, new: Any, *, offsets: bool = True) -> bool:
    """Check whether two fake values of one call agree in everything but memory; `offsets` compares storage offsets."""
    before, after = tree_leaves(old), tree_leaves(new)
    return len(before) == len(after) and all(_leaves_agree(*both, offsets) for both in zip(before, after, strict=True))


def _leaves_agree(old: Any, new: Any, offsets: bool) -> bool:
    if isinstance(old, _NUMBERS) and isinstance(new, _NUMBERS):
        return _same_number(old, new)
    if not (isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor)):
        return type(old) is type(new)
    kinds = [(one.dtype, one.device, one.layout, one.dim()) for one in (old, new)]
    return kinds[0] == kinds[1] and all(map(_same_number, _numbers(old, offsets), _numbers(new, offsets)))


_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_NUMBERS = (bool, int, float, *_SYMBOLS)


def _numbers(fake: torch.Tensor, offset: bool) -> tuple[int | torch.SymInt, ...]:
    if fake.layout is not torch.strided:
        return tuple(fake.shape)
    return (*fake.shape, *fake.stride(), *([fake.storage_offset()] if offset else []))


def _same_number(old: Any, new: Any) -> bool:
    """Check whether two scalars are known to be equal. Arithmetic may spell one size in several ways."""
    return bool(given_expression(old) == given_expression(new)) or known_true(old == new)


def _described(value: Any) -> str:
    return ", ".join(map(str, map(caller_layout, tree_leaves(value))))


def _is_contiguous_view(node: Node) -> bool:
    """Check whether a node gives a contiguous tensor other sizes, and its value is that view already.

    If it were called, torch would guard on whether symbolic sizes divide each other. A trace by way of other sizes has
    no such guards, and each is a reason to compile again.
    """
    if node.target not in RESHAPES or len(node.args) < 2 or not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    given: Any = map_arg(node.args, lambda one: one.meta["val"])
    source, sizes = given
    view = node.meta["val"]
    asked = (*sizes, source.numel(), source.storage_offset())
    found = (*view.shape, view.numel(), view.storage_offset())
    return (
        is_contiguous(source)
        and is_contiguous(view)
        and source.dtype == view.dtype
        and storage_identity(source) == storage_identity(view)
        and len(asked) == len(found)
        and all(
            (type(one) is int and one == -1) or _same_number(one, own) for one, own in zip(asked, found, strict=True)
        )
    )


def _same(old: Any, new: Any, made: Mapping[int, Node]) -> bool:
    """Check whether a node's new fake value equals its old one.

    `made` are the allocations of the nodes before it.
    """
    if not _agree(old, new):
        return False
    paired: dict[int, int] = {}
    for before, after in zip(fakes_in(old), fakes_in(new), strict=True):
        memory, own = storage_identity(before), storage_identity(after)
        if memory != own and (memory in made or own in made):
            return False
        if paired.setdefault(memory, own) != own:
            return False
    return True


def caller_layout(value: Any) -> Any:
    """Describe an output as a caller sees it: dtype, device, shape, and strides of dimensions of several elements."""
    if not isinstance(value, torch.Tensor):
        return str(value)
    shape = tuple(map(str, value.shape))
    if value.layout is not torch.strided:
        return value.dtype, value.device, shape
    steps = zip(value.shape, value.stride(), strict=True)
    strides = tuple("any" if known_true(size == 1) else str(step) for size, step in steps)
    return value.dtype, value.device, shape, strides


def looks_same(old: Any, new: Any) -> bool:
    """Check whether a caller sees the same output in two values; a symbolic size or stride has several spellings."""
    if not all(isinstance(value, torch.Tensor) and value.layout is torch.strided for value in (old, new)):
        return bool(caller_layout(old) == caller_layout(new))
    if (old.dtype, old.device) != (new.dtype, new.device) or not known_equal(old.shape, new.shape):
        return False
    if all(has_strides(value, range(value.dim())) for value in (old, new)):
        return True
    long = [axis for axis, size in enumerate(old.shape) if not known_true(size == 1)]
    return known_equal([old.stride(axis) for axis in long], [new.stride(axis) for axis in long])
