"""Run random ops in torch, in eager's order; sessions get the random numbers as inputs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.passes.infra.pass_base import PassBase, PassResult
from torch.utils.checkpoint import CheckpointPolicy

from ort_dynamo.graph.marks import HALF, RANDOM, RECOMPUTE
from ort_dynamo.passes.fx.analysis.fake_values import add_call
from ort_dynamo.passes.fx.analysis.saved_tensors import is_random, must_recompute, tag
from ort_dynamo.passes.fx.analysis.size_nodes import SizeNodes
from ort_dynamo.passes.ordering import Condition, ordering
from ort_dynamo.torch_internals.fakes import detect_fake_mode, fakes_around
from ort_dynamo.torch_internals.kernels.dropout_mask import DROPOUT_MASK
from ort_dynamo.torch_internals.kernels.operators import aten, prims
from ort_dynamo.torch_internals.sizes.symbols import is_unbacked

__all__ = ["HoistRandom", "is_random_op"]


# Random ops that read only the shape, strides, dtype and device of their first argument, never its data.
_LIKE = (
    aten.rand_like,
    aten.randn_like,
    aten.randint_like,
    aten.normal_functional,
    aten.uniform,
    aten.exponential,
    aten.geometric,
    aten.log_normal,
    aten.cauchy,
    aten.random,
)
_LIKE_OVERLOADS = (aten.bernoulli.p,)
_CREATE = (aten.rand, aten.randn, aten.randint, aten.randperm)
_CREATE_OVERLOADS = (aten.normal.float_float, prims.normal.default, prims.uniform.default)
_EMPTY = (aten.empty, aten.empty_strided, aten.empty_permuted, aten.empty_like, aten.new_empty, aten.new_empty_strided)


@ordering(gives=[Condition.RANDOM_APART])
@dataclass(frozen=True)
class HoistRandom(PassBase):
    """Make each random op independent of data, and mark it (meta[RANDOM]) so that torch runs it and saves its result.

    1. `native_dropout(x, p, True)` becomes a random mask and `x * (mask / (1 - p))`, eager's own formula on the CPU.
       The mask comes from the same call as in eager, with the same shape, strides and probability. So the same seed
       gives the same mask.
    2. A random op that only looks at its argument's shape (`rand_like(x)`, …) gets an uninitialized tensor instead,
       unless nothing else reads a random op that the argument is computed from: it has to run, too.
    3. A random op without tensor arguments (`rand(2, 3)`) is only marked.
    4. With `deterministic`, an uninitialized tensor counts as a random op: torch fills it, as its settings say.

    A random op that reads data (`multinomial(weights)`) stays a fallback at its position. Random ops keep their order.
    Marked nodes, and random ops inside torch.utils.checkpoint, are tagged MUST_SAVE. So no partitioner runs one again
    in the backward, or saves the generator's state for that.

    Attributes:
        deterministic: whether the graph runs under torch.use_deterministic_algorithms(True).
    """

    deterministic: bool = False
    name: str = "hoist_random"

    def call(self, graph_module: GraphModule) -> PassResult:
        """Rewrite `graph_module` in place."""
        graph = graph_module.graph
        modified = False
        detached: dict[Node, Node] = {}
        for node in list(graph.nodes):
            if node.op != "call_function" or RANDOM in node.meta:
                continue
            if node.target is aten.native_dropout.default:
                if node.args[2] is not False and 0.0 < float(node.args[1]) < 1.0:
                    _Rewriter(graph_module, node).split_dropout()
                    modified = True
            elif _is_one_of(node.target, _LIKE, _LIKE_OVERLOADS):
                if (source := _Rewriter(graph_module, node).detach_from_data()) is not None:
                    detached[node] = source
                modified = True
            elif _is_one_of(node.target, _CREATE, _CREATE_OVERLOADS):
                _mark(node)
                modified = True
            elif self.deterministic and _is_one_of(node.target, _EMPTY, ()):
                _Rewriter(graph_module, node).hoist_empty()
                modified = True
            elif is_random(node) and must_recompute(node):
                results = [user for user in node.users if user.target is operator.getitem]
                modified |= tag((node, *results), CheckpointPolicy.MUST_SAVE, self.name)
        if modified:
            _keep_random_ops(graph, detached)
            graph.eliminate_dead_code()
            graph_module.recompile()
        return PassResult(graph_module, modified)


def is_random_op(target: object) -> bool:
    """Check whether HoistRandom takes calls of `target` out of the sessions."""
    return (
        target is aten.native_dropout.default
        or _is_one_of(target, _LIKE, _LIKE_OVERLOADS)
        or _is_one_of(target, _CREATE, _CREATE_OVERLOADS)
    )


def _keep_random_ops(graph: Graph, detached: dict[Node, Node]) -> None:
    """Let random ops read their arguments again where a random op would run no more, and so not move the generator.

    Args:
        graph: a graph in which each random op was read.
        detached: random op -> the argument that it no longer reads, in the graph's order.
    """
    run = _with_inputs(graph.output_node())
    for node, source in reversed(detached.items()):
        needed = _with_inputs(source) - run
        if node in run and any(map(_moves_generator, needed)):
            node.update_arg(0, source)
            run |= needed


def _with_inputs(node: Node) -> set[Node]:
    """Return a node and all nodes that it is computed from."""
    found, left = {node}, [node]
    while left:
        new = set(left.pop().all_input_nodes) - found
        found |= new
        left += new
    return found


def _moves_generator(node: Node) -> bool:
    return node.target is DROPOUT_MASK or is_random_op(node.target) or is_random(node)


def _is_one_of(target: object, packets: tuple[Any, ...], overloads: tuple[Any, ...]) -> bool:
    return getattr(target, "overloadpacket", None) in packets or target in overloads


def _mark(node: Node) -> Node:
    node.meta[RANDOM] = True
    node.meta[RECOMPUTE] = CheckpointPolicy.MUST_SAVE
    return node


def _carriers(node: Node) -> Iterator[Node]:
    """Yield the nodes from which the sizes around a random op may be read: no tangent, on which no forward depends."""
    by_data = is_unbacked(*(size for fake in fakes_around(node) for size in fake.shape))
    before = takewhile(lambda one: one is not node, node.graph.nodes)
    for one in before if by_data else node.graph.find_nodes(op="placeholder"):
        if one.op != "placeholder" or "tangents" not in one.name:
            yield one


_INHERITED = ("stack_trace", "nn_module_stack", "seq_nr", HALF, RECOMPUTE, "ac_graph_id")
"""Meta keys that new nodes copy from the random op they replace: those of torch and torch.utils.checkpoint."""


class _Rewriter:
    """Rewrites one random op. New nodes stand before it and get its stack trace."""

    def __init__(self, gm: GraphModule, node: Node) -> None:
        self._gm = gm
        self._graph = gm.graph
        self._node = node
        self._meta = {key: node.meta[key] for key in _INHERITED if key in node.meta}
        self._sizes = SizeNodes(gm.graph, self._meta, _carriers(node))

    def split_dropout(self) -> None:
        node = self._node
        source, probability = node.args[0], float(node.args[1])  # type: ignore[arg-type]
        fake: torch.Tensor = source.meta["val"]  # type: ignore[union-attr]
        with self._graph.inserting_before(node):
            if fake.device.type == "cpu":
                # Eager fills a tensor of x's dtype; the random stream does not depend on the dtype.
                with self._fake_mode():
                    sizes, strides = self._layout(torch.empty_like(fake))  # dense, where x may be expanded
                mask = _mark(self._call(DROPOUT_MASK, sizes, strides, 1 - probability, device=fake.device))
            else:
                # The CUDA kernel's random stream depends on dtype and vector width, so use eager's own call.
                empty = self._empty_like(fake, fake.dtype)
                both = _mark(self._call(aten.native_dropout.default, empty, probability, True))
                mask = _mark(self._call(operator.getitem, both, 1))
            noise = self._call(aten._to_copy.default, mask, dtype=fake.dtype)
            noise = self._call(aten.div.Tensor, noise, 1 - probability)
            result = self._call(aten.mul.Tensor, source, noise)
        for user in list(node.users):
            replacement = result if user.args[1] == 0 else mask
            user.replace_all_uses_with(replacement)
            self._graph.erase_node(user)
        self._graph.erase_node(node)

    def detach_from_data(self) -> Node | None:
        """Return the argument that the random op no longer reads; None if it still does."""
        node = _mark(self._node)
        source = node.args[0]
        assert isinstance(source, Node)
        if is_random_op(source.target):  # in rand_like(x).uniform_() both ops advance the generator
            return None
        fake: torch.Tensor = source.meta["val"]
        with self._graph.inserting_before(node):
            node.update_arg(0, self._empty_like(fake, fake.dtype))
        return source

    def hoist_empty(self) -> None:
        node, fake = self._node, self._node.meta["val"]
        with self._graph.inserting_before(node):
            empty = self._empty_like(fake, fake.dtype)
        node.replace_all_uses_with(empty)
        self._graph.erase_node(node)

    def _empty_like(self, fake: torch.Tensor, dtype: torch.dtype) -> Node:
        sizes, strides = self._layout(fake)
        return _mark(self._call(aten.empty_strided.default, sizes, strides, dtype=dtype, device=fake.device))

    def _layout(self, fake: torch.Tensor) -> tuple[list[int | Node], list[int | Node]]:
        return list(map(self._number, fake.shape)), list(map(self._number, fake.stride()))

    def _call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        return add_call(self._graph, target, args, kwargs, self._meta)

    def _fake_mode(self) -> Any:
        mode = detect_fake_mode(
            [node.meta.get("val") for node in (*self._graph.find_nodes(op="placeholder"), self._node)]
        )
        assert mode is not None
        return mode

    def _number(self, size: int | torch.SymInt) -> int | Node:
        number = self._sizes.number(size)
        if number is None:
            raise ValueError(f"{self.__class__.__name__}: no input carries the size {size}")
        return number
