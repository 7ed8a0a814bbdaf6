"""Leave many small operators to torch, which runs them in one kernel; a session launches one for each tensor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from ort_dynamo.graph.marks import CHOSEN
from ort_dynamo.passes.fx.analysis.fused_readers import is_read_in_kernel
from ort_dynamo.passes.fx.analysis.views import is_remakable_view
from ort_dynamo.passes.fx.torch_graph.count_multiplications import CONVOLUTIONS, PRODUCTS
from ort_dynamo.passes.fx.torch_graph.mark_chosen import choose
from ort_dynamo.passes.fx.torch_graph.whole_kernels import FOREACH, is_count, is_plain_cast
from ort_dynamo.passes.ordering import Condition, ordering

__all__ = ["PlaceForeach"]

_FEWEST = 4


@ordering(needs=[Condition.PLACED])
@dataclass(frozen=True)
class PlaceForeach(PassBase):
    """Mark casts and counters that would not be part of a fused kernel, for torch's `foreach` functions.

    - the cast of a weight to a half type, which a matmul or a convolution reads,
    - the cast of a weight's gradient back, which is a result,
    - `num_batches_tracked + 1` of batch norms.

    `CallForeach` merges them into one call. The pass skips kinds with few nodes.
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


def _is_lone_cast(node: Node) -> bool:
    """Check whether a cast is of an input and read by matmuls alone, or of a matmul's result and returned."""
    if not is_plain_cast(node):
        return False
    source: Any = node.args[0]
    readers = list(_readers(node))
    if source.op == "placeholder":
        return bool(readers) and all(reader.op != "output" and not is_read_in_kernel(reader) for reader in readers)
    return _is_of_product(source) and all(reader.op == "output" for reader in readers)


def _readers(node: Node) -> Iterator[Node]:
    """Yield the nodes that read a value, through views."""
    for user in node.users:
        if is_remakable_view(user):
            yield from _readers(user)
        else:
            yield user


def _is_of_product(node: Node) -> bool:
    """Check whether a value is the result of a matmul or a convolution, through views."""
    while is_remakable_view(node):
        (node, *_) = node.all_input_nodes
    if node.target in PRODUCTS:
        return True
    return bool(node.all_input_nodes) and node.all_input_nodes[0].target in CONVOLUTIONS
