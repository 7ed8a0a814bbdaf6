"""What a graph writes to its inputs."""

from __future__ import annotations

from torch.fx import Node

from ort_dynamo.torch_internals.operators import OpOverload, is_mutable, schema_of

__all__ = ["writes_input"]


def writes_input(node: Node) -> bool:
    """Whether `node` is ATen's `copy_`, `set_` or the like on an input, or resizes its storage."""
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace not in ("aten", "inductor"):
        return False
    # The schema of inductor's resize_storage_bytes_ does not say that it writes.
    if not (is_mutable(target) or schema_of(target).name.endswith("_")):
        return False
    written = node.args[0] if node.args else None
    return isinstance(written, Node) and written.op == "placeholder"
