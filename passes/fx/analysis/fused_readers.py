"""Operators that are computed in a fused kernel with the makers of their operands (docs/internals/fused_kernels.md)."""

from __future__ import annotations

import torch
from torch.fx import Node

from ort_dynamo.passes.fx.analysis.saved_tensors import CASTS, calls
from ort_dynamo.torch_internals.kernels.operators import OpOverload, aten

__all__ = ["FEW", "is_no_more", "is_pointwise", "is_read_in_kernel"]

FEW = 64
"""A kernel may read more bytes than its result has, by one part in FEW."""

_ROWS = (
    *(aten.sum, aten.mean, aten.amax, aten.amin),
    *(aten._softmax, aten._log_softmax, aten._softmax_backward_data, aten._log_softmax_backward_data),
    *(aten.native_layer_norm, aten.native_layer_norm_backward),
    *(aten._fused_rms_norm, aten._fused_rms_norm_backward),
    *(aten.nll_loss_forward, aten.nll_loss_backward, aten.nll_loss2d_forward, aten.nll_loss2d_backward),
)
"""Operators in addition to pointwise ones; some read only a shape."""


def is_no_more(nbytes: int, than: int) -> bool:
    """Compare bytes that a kernel reads with those of its result; a small tensor, such as a bias, counts nothing."""
    return nbytes <= than + than // FEW


def is_pointwise(node: Node) -> bool:
    """Check whether a node computes each element of its result from one of each operand."""
    target = node.target
    return isinstance(target, OpOverload) and (torch.Tag.pointwise in target.tags or calls(node, CASTS))


def is_read_in_kernel(node: Node) -> bool:
    """Check whether a node can be one kernel with the makers of its operands."""
    return is_pointwise(node) or calls(node, _ROWS)
