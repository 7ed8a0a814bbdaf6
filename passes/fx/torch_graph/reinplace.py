"""Run pointwise operators that torch computes in place, where their input is dead."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from ort_dynamo.passes.fx.analysis.aliases import AliasSets
from ort_dynamo.passes.fx.analysis.storage import are_laid_out_alike
from ort_dynamo.passes.fx.torch_graph.count_multiplications import CONVOLUTIONS
from ort_dynamo.passes.ordering import Condition, ordering
from ort_dynamo.torch_internals.kernels.operators import (
    OpOverload,
    aten,
    in_place_of,
    is_absent,
    is_mutable,
    is_pointwise,
)
from ort_dynamo.torch_internals.sizes.symbols import known_equal, known_true

__all__ = ["Reinplace"]

_OVER_GRADIENT: Mapping[OpOverload, OpOverload] = {
    aten.elu_backward.default: aten.elu_backward.grad_input,
    aten.gelu_backward.default: aten.gelu_backward.grad_input,
    aten.hardsigmoid_backward.default: aten.hardsigmoid_backward.grad_input,
    aten.hardtanh_backward.default: aten.hardtanh_backward.grad_input,
    aten.leaky_relu_backward.default: aten.leaky_relu_backward.grad_input,
    aten.sigmoid_backward.default: aten.sigmoid_backward.grad_input,
    aten.silu_backward.default: aten.silu_backward.grad_input,
    aten.tanh_backward.default: aten.tanh_backward.grad_input,
    aten.threshold_backward.default: aten.threshold_backward.grad_input,
}
"""Gradient of a pointwise operator -> its `out` overload, which writes over the first input here."""

_COMMUTES = (aten.add.Tensor, aten.mul.Tensor)

_FRESH = frozenset(
    {
        *CONVOLUTIONS,
        aten._native_batch_norm_legit_functional.default,
        aten._native_batch_norm_legit.no_stats,
        aten._native_batch_norm_legit_no_training.default,
        aten._batch_norm_with_update_functional.default,
        aten.native_batch_norm.default,
        aten.native_batch_norm_backward.default,
        aten.batch_norm_backward.default,
        aten.max_pool2d_with_indices_backward.default,
        aten.avg_pool2d.default,
        aten.avg_pool2d_backward.default,
        aten._adaptive_avg_pool2d_backward.default,
        aten.cat.default,
        aten.mm.default,
        aten.bmm.default,
        aten.addmm.default,
        aten.native_layer_norm.default,
        aten.native_layer_norm_backward.default,
    }
)
"""Operators beside the pointwise ones whose tensors are always in memory that they allocate themselves."""


@ordering(needs=[Condition.FUNCTIONAL, Condition.RESULTS_OWNED, Condition.STRIDES_GIVEN], ends=[Condition.FUNCTIONAL])
@dataclass(frozen=True)
class Reinplace(PassBase):
    """Run pointwise operators of an outer graph in place, over an input of the same layout that is dead.

    Memory that was just written is in the processor's cache, or at least mapped. New memory is loaded into the cache
    before it is written, and the system has to map the pages of a large tensor first. The pass overwrites only memory
    that the graph has allocated and that is dead, aliases included: no input, no output, no saved tensor. The input may
    be a view of a whole allocation, such as the result of a linear layer.
    """

    name: str = "reinplace"

    def call(self, graph_module: GraphModule) -> PassResult:
        """Rewrite, in place, an outer graph with fake values."""
        nodes = tuple(graph_module.graph.nodes)
        place = {node: index for index, node in enumerate(nodes)}
        aliases = AliasSets(graph_module.graph)
        fresh = {node for node in nodes if _is_fresh(node)}  # asked before anything is rewritten
        modified = False
        for node in nodes:
            for over, target, args, kwargs in _in_place(node):
                sharing = aliases.of(over)
                if sharing[0] in fresh and _can_be_overwritten(over, node, place, sharing):
                    node.target, node.args, node.kwargs = target, args, kwargs
                    aliases.join(node, over)
                    modified = True
                    break
        if modified:
            graph_module.recompile()
        return PassResult(graph_module, modified)


_Call = tuple[Node, OpOverload, tuple[Any, ...], dict[str, Any]]


def _in_place(node: Node) -> Iterator[_Call]:
    """Yield the calls that give the result of `node`, each with the input that it writes over."""
    args: tuple[Any, ...] = node.args
    target: Any = node.target
    if node.op != "call_function" or not args or not isinstance(first := args[0], Node):
        return
    if target in _OVER_GRADIENT and not is_absent(_OVER_GRADIENT[target]):
        yield first, _OVER_GRADIENT[target], args, {**node.kwargs, "grad_input": first}
    elif is_pointwise(target) and target.namespace == "aten" and (written := in_place_of(target)):
        yield first, written, args, dict(node.kwargs)
        if target in _COMMUTES and not node.kwargs and isinstance(args[1], Node):
            yield args[1], written, (args[1], first), {}


def _is_fresh(node: Node) -> bool:
    maker = node.all_input_nodes[0] if node.target is operator.getitem else node
    target: Any = maker.target
    return target in _FRESH or (is_pointwise(target) and not is_mutable(target))


def _can_be_overwritten(over: Node, writer: Node, place: Mapping[Node, int], sharing: Sequence[Node]) -> bool:
    """Check whether `writer` may write its result over `over`.

    `sharing` are the nodes that share that memory; the first of them allocated it.
    """
    return (
        _same_layout(over.meta.get("val"), writer.meta.get("val"))
        and (over is sharing[0] or known_true(over.meta["val"].numel() == sharing[0].meta["val"].numel()))
        and all(_reads_only(user) and place[user] <= place[writer] for one in sharing for user in one.users)
        # The kernel reads and writes at once, so each element must be read where it is written.
        and all(one is over or writer not in one.users for one in sharing)
    )


def _reads_only(user: Node) -> bool:
    """Check whether `user` is an ATen operator: their schemas declare which results alias their inputs."""
    return isinstance(user.target, OpOverload) and user.target.namespace == "aten"


def _same_layout(over: Any, written: Any) -> bool:
    if not (isinstance(over, torch.Tensor) and isinstance(written, torch.Tensor)):
        return False
    # A view of conjugates stays one when it is written over; operators such as view_as_real refuse it.
    return (
        (over.dtype, over.device) == (written.dtype, written.device)
        and known_equal(over.shape, written.shape)
        and are_laid_out_alike(over, written, by_place=False)
    )
