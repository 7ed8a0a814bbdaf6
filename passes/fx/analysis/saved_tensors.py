"""Find the tensors that a joint graph's forward saves for its backward, and the cost of recomputing them."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.flop_counter import flop_registry

from ort_dynamo.graph.marks import DECIDED_BY, HALF, RECOMPUTE
from ort_dynamo.passes.fx.analysis.storage import fakes_in, storage_of
from ort_dynamo.passes.fx.analysis.views import is_view
from ort_dynamo.torch_internals.fakes import storage_identity
from ort_dynamo.torch_internals.kernels.operators import OpOverload, aten, is_mutable, named_arguments, prims
from ort_dynamo.torch_internals.pytree import tree_leaves
from ort_dynamo.torch_internals.sizes.symbols import given_expression, optimization_hint

__all__ = [
    "CASTS",
    "JointGraph",
    "SavedSet",
    "SavedTensor",
    "allocations",
    "bytes_of",
    "calls",
    "can_recompute",
    "cast_source",
    "is_number",
    "is_random",
    "is_tangent",
    "is_tensor",
    "must_recompute",
    "tag",
    "tagged_alike",
    "time_of",
]


@dataclass(frozen=True)
class SavedTensor:
    """One allocation that the forward saves for the backward.

    Attributes:
        nodes: the forward nodes that share it (a tensor and its views).
        nbytes: its size in bytes; symbolic sizes count by their hints.
        size: the same, symbolic.
    """

    nodes: tuple[Node, ...]
    nbytes: int
    size: sympy.Expr


@dataclass(frozen=True)
class SavedSet:
    """The effect of recomputing a set of nodes.

    Attributes:
        saved: tensors that the forward saves; inputs of the graph are not counted, because they stay alive anyway.
        recomputed: the nodes that the backward really recomputes, in order.
    """

    saved: tuple[SavedTensor, ...]
    recomputed: tuple[Node, ...]

    @property
    def nbytes(self) -> int:
        """Bytes saved."""
        return sum(one.nbytes for one in self.saved)

    @property
    def size(self) -> sympy.Expr:
        """The same in symbols."""
        return sympy.Add(*(one.size for one in self.saved))


class JointGraph:
    """A joint graph of AOTAutograd, before it is cut.

    Attributes:
        gm: the graph; nodes carry fake values in meta["val"].
        forward: its forward computation nodes, in order, as torch's default partition takes them.
        backward: the other computation nodes, which all come after these, in order.
    """

    def __init__(self, gm: GraphModule) -> None:
        self.gm = gm
        nodes = list(gm.graph.nodes)
        last = max((i for i, node in enumerate(nodes) if _is_forward(node)), default=-1)
        self.forward: tuple[Node, ...] = tuple(n for n in nodes[: last + 1] if n.op == "call_function")
        self.backward: tuple[Node, ...] = tuple(n for n in nodes[last + 1 :] if n.op == "call_function")
        self._forward = {node: index for index, node in enumerate(self.forward)}

    def is_forward(self, node: Node) -> bool:
        """Check whether `node` is a computation of the forward."""
        return node in self._forward

    def position(self, node: Node) -> int:
        """Index of a node in `forward`."""
        return self._forward[node]

    @cached_property
    def read_by_backward(self) -> tuple[Node, ...]:
        """Forward nodes with a tensor that the backward reads."""
        return tuple(n for n in self.forward if is_tensor(n) and any(self._in_backward(user) for user in n.users))

    @cached_property
    def differentiable(self) -> frozenset[Node]:
        """Forward nodes that a gradient flows through: they depend on an input that gets one."""
        inputs = [n for n in self.gm.graph.find_nodes(op="placeholder") if not is_tangent(n)]
        results = tree_leaves(self.gm.graph.output_node().args[0])
        gradients = results[len(results) - len(inputs) :]
        reached = {node for node, gradient in zip(inputs, gradients, strict=True) if gradient is not None}
        for node in self.forward:
            if any(argument in reached for argument in node.all_input_nodes) and _is_floating(node):
                reached.add(node)
        return frozenset(reached & self._forward.keys())

    @cached_property
    def outputs(self) -> frozenset[Node]:
        """Forward nodes that the graph returns: they live anyway."""
        return frozenset(node for node in self.gm.graph.output_node().all_input_nodes if node in self._forward)

    @cached_property
    def time(self) -> float:
        """Estimated time of the forward, in the unit of time_of."""
        return sum(map(time_of, self.forward))

    def tagged(self) -> set[Node]:
        """Forward nodes that the partitioner will recompute, by their present tags."""
        return {node for node in self.forward if must_recompute(node)}

    def cut(self, recomputed: Collection[Node]) -> SavedSet:
        """Find the saved and the recomputed nodes if `recomputed` are tagged, as far as the backward needs them."""
        wanted = list(self.read_by_backward)
        seen, again, kept = set(wanted), set(), []
        while wanted:
            node = wanted.pop()
            if node not in recomputed:
                kept.append(node)
                continue
            again.add(node)
            for argument in node.all_input_nodes:
                if argument in self._forward and argument not in seen and not is_number(argument):
                    seen.add(argument)
                    wanted.append(argument)
        return SavedSet(self._allocations(kept), tuple(node for node in self.forward if node in again))

    @cached_property
    def last_uses(self) -> dict[int, int]:
        """Allocation that a gradient flows through -> position of the last forward node that reads it."""
        return {
            storage_of(argument): self.position(node)
            for node in self.forward
            for argument in node.all_input_nodes
            if argument in self.differentiable and is_tensor(argument)
        }

    def sharing(self, nodes: Iterable[Node]) -> list[Node]:
        """Give the forward nodes that share allocations with `nodes`: these and their views, in order."""
        storages = {storage_of(node) for node in nodes}
        return sorted((n for storage in storages for n in self._values[storage]), key=self.position)

    @cached_property
    def _values(self) -> dict[int, list[Node]]:
        """Allocation -> the forward nodes whose values live in it."""
        found: dict[int, list[Node]] = {}
        for node in filter(is_tensor, self.forward):
            found.setdefault(storage_of(node), []).append(node)
        return found

    @cached_property
    def inputs(self) -> frozenset[int]:
        """Storages of the graph's inputs: keeping a view of one costs nothing."""
        return frozenset(storage_of(n) for n in self.gm.graph.find_nodes(op="placeholder") if is_tensor(n))

    @cached_property
    def inputs_read_by_backward(self) -> frozenset[int]:
        """Storages of the inputs that the backward reads: they live as long as saved tensors."""
        inputs = filter(is_tensor, self.gm.graph.find_nodes(op="placeholder"))
        return frozenset(storage_of(node) for node in inputs if any(map(self._in_backward, node.users)))

    def _allocations(self, nodes: Collection[Node]) -> tuple[SavedTensor, ...]:
        groups: dict[int, list[Node]] = {}
        for node in filter(set(nodes).__contains__, self.forward):
            if is_tensor(node) and (key := storage_of(node)) not in self.inputs:
                groups.setdefault(key, []).append(node)
        return tuple(SavedTensor(tuple(group), *bytes_of(group[0].meta["val"])) for group in groups.values())

    def _in_backward(self, user: Node) -> bool:
        # A backward node that reads only a shape makes torch save the sizes, not the tensor.
        return user.op == "call_function" and user not in self._forward and not is_number(user)


def can_recompute(node: Node) -> bool:
    """Check whether `node` can be recomputed.

    Computing it twice has to give the same result and no effect, and it must not have a policy yet. So random ops,
    effects, collectives and nodes tagged by torch.utils.checkpoint's policies are left alone.
    """
    if node.op != "call_function" or RECOMPUTE in node.meta:
        return False
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, Node) and (must_recompute(source) or can_recompute(source))
    target = node.target
    return (
        isinstance(target, OpOverload)
        and target.namespace in ("aten", "prims")
        and not is_mutable(target)
        and not is_random(node)
    )


def is_random(node: Node) -> bool:
    """Check whether `node` is a random op, which advances a generator.

    ATen tags attention as random for its dropout; with dropout probability 0 it is not random.
    """
    target = node.target
    if not isinstance(target, OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    return bool(named_arguments(target, node.args, node.kwargs).get("dropout_p") != 0.0)


def tag(nodes: Iterable[Node], policy: CheckpointPolicy, by: str) -> bool:
    """Give each node the policy, with the name of the pass that decided so; whether any lacked it."""
    changed = False
    for node in nodes:
        changed |= node.meta.get(RECOMPUTE) is not policy
        node.meta[RECOMPUTE] = policy
        node.meta[DECIDED_BY] = by
    return changed


CASTS = (aten._to_copy, prims.convert_element_type)
"""Operators that change a tensor's dtype, for `calls`; the first may change its device or layout as well."""


def calls(node: Node, packets: Collection[object]) -> bool:
    """Check whether `node` calls an overload of one of the operators `packets`."""
    return getattr(node.target, "overloadpacket", None) in packets


def cast_source(node: Node) -> Node | None:
    """Return the tensor that `node` casts; None of any other node, and of a number that torch.vmap made a tensor."""
    source = node.args[0] if calls(node, CASTS) else None
    return source if isinstance(source, Node) and not is_number(source) else None


def must_recompute(node: Node) -> bool:
    """Check whether the partitioner will recompute `node`."""
    return node.meta.get(RECOMPUTE) in (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def tagged_alike(a: Node, b: Node) -> bool:
    """Check whether two nodes have the same recompute policy, or none: both are saved, or both are recomputed."""
    return a.meta.get(RECOMPUTE) is b.meta.get(RECOMPUTE)


_FLOPS_PER_BYTE = 10.0
"""Float32 operations in the time of moving one byte, about as on today's CPUs (5 to 20) and GPUs (10 to 30).

Only ratios of times are used."""


def time_of(node: Node) -> float:
    """Estimated time of a node in units of moving one byte: the roofline max(flops / balance, bytes moved).

    Williams, Waterman, Patterson: Roofline, CACM 52(4), 2009. Views take none.
    """
    if is_number(node) or is_view(node):
        return 0.0
    own = fakes_in(node.meta.get("val"))
    given = fakes_in([n.meta.get("val") for n in node.all_input_nodes])
    moved = float(sum(_numel(fake) * fake.element_size() for fake in (*own, *given)))
    return max(moved, _flops(node) / _FLOPS_PER_BYTE)


def _flops(node: Node) -> float:
    packet = getattr(node.target, "overloadpacket", None)
    attention, count = _ATTENTION.get(packet), flop_registry.get(packet)
    if attention is None and count is None:
        return 0.0
    values: Any = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    args, kwargs = values
    if attention is not None:
        return float(optimization_hint(attention.flops(*args[attention.query : attention.query + 3])))
    assert count is not None
    return float(optimization_hint(count(*args, **kwargs, out_val=node.meta["val"])))


@dataclass(frozen=True)
class _Attention:
    """The layout of an attention operator's query, key and value.

    Up to torch 2.11, torch's own FLOP count rejects grouped-query attention. It confuses rows and heads of the
    operators of `scaled_dot_product_attention` that have these dimensions in the other order.

    Attributes:
        query: index of the query, which key and value follow.
        rows: the dimension of a tensor's rows, counted from the end.
        products: the number of matmuls, in units of the forward's.
    """

    query: int = 0
    rows: int = -2
    products: float = 1.0

    def flops(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
        """Count two matmuls per query head; several heads may share a key and a value head."""
        width = query.shape[-1] + value.shape[-1]
        return int(2 * self.products) * math.prod(query.shape[:-1]) * key.shape[self.rows] * width


_ATTENTION: Mapping[Any, _Attention] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _Attention(),
    aten._scaled_dot_product_flash_attention: _Attention(),
    aten._scaled_dot_product_efficient_attention: _Attention(),
    aten._scaled_dot_product_cudnn_attention: _Attention(),
    aten._flash_attention_forward: _Attention(rows=-3),
    aten._efficient_attention_forward: _Attention(rows=-3),
    aten._scaled_dot_product_flash_attention_backward: _Attention(1, products=2.5),
    aten._scaled_dot_product_efficient_attention_backward: _Attention(1, products=2.5),
    aten._scaled_dot_product_cudnn_attention_backward: _Attention(1, products=2.5),
    aten._flash_attention_backward: _Attention(1, rows=-3, products=2.5),
    aten._efficient_attention_backward: _Attention(1, rows=-3, products=2.5),
}
"""Operator -> how it has its operands. A gradient repeats one matmul of the forward, and has two for each of both."""


def bytes_of(fake: torch.Tensor) -> tuple[int, sympy.Expr]:
    """Bytes of the allocation that a tensor lives in, symbolic sizes by their hints, and the same in symbols.

    A view keeps all of its base alive, in eager and across a cut of the graph.
    """
    nbytes: int | torch.SymInt = fake.untyped_storage().nbytes()
    return optimization_hint(nbytes), sympy.expand(given_expression(nbytes))


def allocations(node: Node) -> list[tuple[int, int]]:
    """Return the allocations that the tensors in a node's value live in, each with its bytes."""
    return [(storage_identity(fake), bytes_of(fake)[0]) for fake in fakes_in(node.meta.get("val"))]


def _numel(fake: torch.Tensor) -> int:
    return math.prod(map(optimization_hint, fake.shape))


def _is_forward(node: Node) -> bool:
    return node.meta.get(HALF) == "is_forward" or (node.op == "placeholder" and not is_tangent(node))


def is_tangent(node: Node) -> bool:
    """Check whether the node is a tangent: a gradient that a joint or backward graph takes as input."""
    return node.op == "placeholder" and "tangents" in str(node.target)


def is_tensor(node: Node) -> bool:
    """Check whether the node's value is one strided tensor. A sparse tensor has no memory of its own."""
    fake = node.meta.get("val")
    return isinstance(fake, torch.Tensor) and fake.layout is torch.strided


def _is_floating(node: Node) -> bool:
    return any(fake.is_floating_point() for fake in fakes_in(node.meta.get("val")))


def is_number(node: Node) -> bool:
    """Check whether the node's value is a Python scalar or a symbolic one."""
    return isinstance(node.meta.get("val"), (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))
