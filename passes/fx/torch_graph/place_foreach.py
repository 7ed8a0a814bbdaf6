"""Have torch compute in one kernel what a session would launch a kernel each for, tensor after tensor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from ort_dynamo.marks import CHOSEN
from ort_dynamo.passes.fx.analysis.fused_readers import is_read_in_kernel
from ort_dynamo.passes.fx.analysis.views import is_remakable_view
from ort_dynamo.passes.fx.torch_graph.choice import choose
from ort_dynamo.passes.fx.torch_graph.work import CONVOLUTIONS, PRODUCTS
from ort_dynamo.torch_internals.operators import aten

__all__ = ["FOREACH", "PlaceForeach", "is_count", "is_plain_cast"]

FOREACH = "torch computes many tensors in one kernel"

_FEWEST = 4
_CAST_ARGUMENTS = frozenset({"dtype", "layout", "device"})


@dataclass(frozen=True)
class PlaceForeach(PassBase):
    """Mark casts and counts that no fused kernel would be part of, for torch's `foreach` functions.

    - the cast of a weight to a half type, which a matmul or a convolution reads,
    - the cast of a weight's gradient back, which is a result,
    - `num_batches_tracked + 1` of batch norms.

    `CallForeach` makes one call of many. The pass marks no kind of which there are few.
    """

    name: str = "place_foreach"

    def call(self, graph_module: GraphModule) -> PassResult:
        """Mark nodes of a joint or inference graph."""
        nodes = [node for node in graph_module.graph.nodes if CHOSEN not in node.meta]
        modified = False
        for is_kind in (_is_lone_cast, is_count):
            found = list(filter(is_kind, nodes))
            modified |= len(found) >= _FEWEST and choose(found, FOREACH)
        return PassResult(graph_module, modified)


def is_plain_cast(node: Node) -> bool:
    """Ask whether a node changes the type of a floating tensor, neither its device nor its strides."""
    if node.target is not aten._to_copy.default or not node.kwargs.keys() <= _CAST_ARGUMENTS:
        return False
    source: Any = node.args[0]
    given, result = source.meta["val"], node.meta["val"]
    if not (given.dtype.is_floating_point and result.dtype.is_floating_point and given.layout is torch.strided):
        return False
    is_same = (given.device, given.layout, given.stride()) == (result.device, result.layout, result.stride())
    return is_same and _is_known(given)


def is_count(node: Node) -> bool:
    """Ask whether a node adds a number to an int64 input of one element."""
    if node.target is not aten.add.Tensor or node.kwargs or not isinstance(node.args[1], int):
        return False
    source: Any = node.args[0]
    fake = source.meta["val"]
    return source.op == "placeholder" and fake.dim() == 0 and fake.dtype == torch.int64


def _is_known(fake: torch.Tensor) -> bool:
    return all(isinstance(size, int) for size in (*fake.shape, *fake.stride())) and fake.numel() > 0


def _is_lone_cast(node: Node) -> bool:
    """Ask whether a cast is of an input and read by products alone, or of a product's result and returned."""
    if not is_plain_cast(node):
        return False
    source: Any = node.args[0]
    readers = list(_readers(node))
    if source.op == "placeholder":
        return bool(readers) and all(reader.op != "output" and not is_read_in_kernel(reader) for reader in readers)
    return _is_of_product(source) and all(reader.op == "output" for reader in readers)


def _readers(node: Node) -> Iterator[Node]:
    """The nodes that read a value, behind views."""
    for user in node.users:
        if is_remakable_view(user):
            yield from _readers(user)
        else:
            yield user


def _is_of_product(node: Node) -> bool:
    """Ask whether a value is a matmul, or a result of a convolution, behind views."""
    while is_remakable_view(node):
        (node, *_) = node.all_input_nodes
    if node.target in PRODUCTS:
        return True
    return bool(node.all_input_nodes) and node.all_input_nodes[0].target in CONVOLUTIONS
