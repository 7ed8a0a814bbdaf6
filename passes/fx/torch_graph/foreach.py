"""Tests for nodes that one foreach call of torch can compute for many tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from ort_dynamo.passes.fx.analysis.saved_tensors import cast_source
from ort_dynamo.passes.fx.torch_graph.images import CAST_ARGUMENTS, is_known
from ort_dynamo.torch_internals.kernels.operators import aten

__all__ = ["FOREACH", "is_count", "is_plain_cast"]

FOREACH = "torch computes many tensors in one kernel"
"""The reason of nodes that become part of such a call."""


def is_plain_cast(node: Node) -> bool:
    """Check whether a node changes the type of a floating tensor, neither its device nor its strides."""
    if node.target is not aten._to_copy.default or not node.kwargs.keys() <= CAST_ARGUMENTS:
        return False
    source = cast_source(node)
    if source is None:
        return False
    given, result = source.meta["val"], node.meta["val"]
    if not (given.dtype.is_floating_point and result.dtype.is_floating_point and given.layout is torch.strided):
        return False
    is_same = (given.device, given.layout, given.stride()) == (result.device, result.layout, result.stride())
    return is_same and is_known(given)


def is_count(node: Node) -> bool:
    """Check whether a node adds a scalar to an int64 input of one element."""
    if node.target is not aten.add.Tensor or node.kwargs or not isinstance(node.args[1], int):
        return False
    source: Any = node.args[0]
    fake = source.meta["val"]
    return source.op == "placeholder" and fake.dim() == 0 and fake.dtype == torch.int64
