"""Find the inputs that a graph writes to."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import GraphModule, Node

from ort_dynamo.passes.fx.analysis.storage import storage_of
from ort_dynamo.torch_internals.kernels.operators import OpOverload, is_mutable, schema_of

__all__ = ["mutated_storages", "writes_input"]


def mutated_storages(gm: GraphModule) -> set[int]:
    """Return the allocations of inputs that are written to, in the graph or by AOTAutograd after the forward."""
    return set(map(storage_of, _mutated_inputs(gm)))


def _mutated_inputs(gm: GraphModule) -> Iterator[Node]:
    """Yield the inputs that AOTAutograd writes to, as it describes outputs, and those that the graph writes to."""
    written = [d.mutated_input for d in gm.graph.output_node().meta.get("desc", ()) if hasattr(d, "mutated_input")]
    for node in gm.graph.find_nodes(op="placeholder"):
        if node.meta.get("desc") in written and isinstance(node.meta.get("val"), torch.Tensor):
            yield node
    for node in gm.graph.nodes:
        if writes_input(node):
            yield node.args[0]


def writes_input(node: Node) -> bool:
    """Check whether `node` is ATen's `copy_`, `set_` or the like on an input, or resizes an input's storage."""
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace not in ("aten", "inductor"):
        return False
    # The schema of inductor's resize_storage_bytes_ does not say that it writes.
    if not (is_mutable(target) or schema_of(target).name.endswith("_")):
        return False
    written = node.args[0] if node.args else None
    return isinstance(written, Node) and written.op == "placeholder"
