"""Subtract means before a group normalization in channels_last, whose kernel cancels digits without that.

Torch's CPU kernel for contiguous images updates a mean and a sum of squared deviations from it. Its kernel for
channels_last computes

    variance = sum(x^2) / n - mean^2

which loses all digits where the mean of a group is much larger than the deviation (Chan, Golub and LeVeque,
"Algorithms for computing the sample variance", 1983, equation 1.5). A normalization of `x - mean` has the same result
and gradients, and cancels nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from ort_dynamo.torch_internals.kernels.operators import aten

__all__ = ["GROUP_NORM", "can_center", "center"]

GROUP_NORM = aten.native_group_norm.default
_GRADIENT = aten.native_group_norm_backward.default


def can_center(norm: Node) -> bool:
    """Check whether only gradients of the normalization read its mean, and a difference is as exact as its operands.

    A difference of half types would be rounded to their few digits.
    """
    image: Any = norm.args[0]
    is_single = image.meta["val"].dtype == torch.float32 and isinstance(norm.args[4], int)
    readers = (reader for mean in norm.users if mean.args[1] == 1 for reader in mean.users)
    return is_single and all(_is_gradient(reader, norm, image) for reader in readers)


def center(norm: Node, image: Node, add: Callable[..., Node]) -> Node:
    """Normalize an image less its means, in the forward and in the gradients.

    Args:
        norm: a normalization that `can_center` has accepted.
        image: the node that it read when it was accepted; its operand may be a copy since.
        add: adds a call for a node: that node, the target, the arguments.

    Returns:
        The difference: the image's shape, dtype and strides.
    """
    operand, (channels, _, groups) = norm.args[0], norm.args[4:7]
    with norm.graph.inserting_before(norm):
        mean = add(norm, aten.mean.dim, (operand, [2, 3], True))
        if groups != channels:
            rows = add(norm, aten.view.default, (mean, [-1, groups, channels // groups]))  # type: ignore[operator]
            mean = add(norm, aten.mean.dim, (rows, [2], True))
            mean = add(norm, aten.expand.default, (mean, [-1, -1, channels // groups]))  # type: ignore[operator]
            mean = add(norm, aten.clone.default, (mean,), {"memory_format": torch.contiguous_format})
            mean = add(norm, aten.view.default, (mean, [-1, channels, 1, 1]))
        centered = add(norm, aten.sub.Tensor, (operand, mean))
    norm.update_arg(0, centered)
    for reader in {reader for result in norm.users for reader in result.users}:
        if _is_gradient(reader, norm, image):
            reader.update_arg(1, centered)
    return centered


def _is_gradient(reader: Node, norm: Node, image: Node) -> bool:
    """Check whether a node is the gradient of a normalization of an image."""
    if reader.target is not _GRADIENT or reader.args[1] is not image:
        return False
    mean: Any = reader.args[2]
    return mean.target is operator.getitem and mean.args[0] is norm
