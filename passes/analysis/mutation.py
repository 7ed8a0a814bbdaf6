"""What a graph writes to its inputs."""

from __future__ import annotations

import torch
from torch.fx import Node

__all__ = ["writes_input"]


def writes_input(node: Node) -> bool:
    """Whether `node` is ATen's `copy_`, `set_` or the like on an input, as AOTAutograd adds them where a graph ends."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten" or not target._schema.is_mutable:
        return False
    written = node.args[0] if node.args else None
    return isinstance(written, Node) and written.op == "placeholder"
