"""Images with their channels last: which operators compute them, and how views of them are written."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Node

from ort_dynamo.graph.boundary import has_strides, inverse
from ort_dynamo.graph.marks import CHANNELS_LAST
from ort_dynamo.passes.fx.torch_graph.mark_chosen import KEPT
from ort_dynamo.torch_internals.kernels.kernel_layouts import CONVOLUTIONS
from ort_dynamo.torch_internals.kernels.operators import aten
from ort_dynamo.torch_internals.kernels.precision import convolves_in_tf32
from ort_dynamo.torch_internals.kernels.view_operators import ALIASES, RESHAPES
from ort_dynamo.torch_internals.sizes.symbols import known_equal, known_true

__all__ = [
    "CAST_ARGUMENTS",
    "POINTWISE",
    "POOLS",
    "SUMS",
    "VIEWS",
    "channels_last",
    "is_back",
    "is_known",
    "is_normalized",
    "is_of_channels",
    "is_permuted",
    "origin",
    "viewed",
]

POOLS = frozenset(
    {
        aten.max_pool2d_with_indices.default,
        aten.max_pool2d_with_indices_backward.default,
        aten.avg_pool2d.default,
        aten.avg_pool2d_backward.default,
        aten._adaptive_avg_pool2d.default,
        aten._adaptive_avg_pool2d_backward.default,
        aten.upsample_nearest2d.vec,
        aten.upsample_nearest2d.default,
        aten.upsample_nearest2d_backward.default,
        aten.upsample_bilinear2d.vec,
        aten.upsample_bilinear2d.default,
        aten.upsample_bilinear2d_backward.default,
    }
)
"""Operators whose CUDA kernels compute channels_last images in channels_last."""

POINTWISE = frozenset({aten.hardtanh_backward.default, aten.hardswish_backward.default, aten.elu_backward.default,
                        aten.leaky_relu_backward.default})  # fmt: skip
"""Pointwise operators without torch's tag."""

VIEWS = frozenset({*ALIASES, *RESHAPES, aten.permute.default, aten.transpose.int, aten.slice.Tensor})

SUMS = frozenset({aten.mean.dim, aten.sum.dim_IntList})


CAST_ARGUMENTS = frozenset({"dtype", "layout", "device"})
"""Arguments of a cast that keeps the memory layout."""


def origin(node: Node) -> dict[str, Any]:
    """Give the meta of a call that is added for a node, but for who runs it."""
    return {key: node.meta[key] for key in KEPT if key in node.meta}


def channels_last(rank: int) -> tuple[int, ...]:
    """Return the axes of an image with its channels last."""
    return (0, *range(2, rank), 1) if rank > 1 else tuple(range(rank))


def is_known(fake: torch.Tensor) -> bool:
    """Check whether strides, and sizes but the first one, are static, and the tensor is not empty."""
    is_static = all(isinstance(size, int) for size in (*fake.shape[1:], *fake.stride()))
    return is_static and known_true(fake.numel() > 0)


def is_permuted(node: Node) -> bool:
    """Check whether a node is a convolution that the pass computes in channels_last."""
    if node.target not in CONVOLUTIONS or CHANNELS_LAST in node.meta:
        return False
    operands = [one.meta["val"] for one in node.all_input_nodes]
    if not all(isinstance(one, torch.Tensor) for one in operands):
        return False
    images = [one for one in operands if one.dim() == 4]
    if not images or not all(map(is_known, operands)) or any(isinstance(size, torch.SymInt) for size in _weight(node)):
        return False
    dtype = images[0].dtype
    return dtype in (torch.bfloat16, torch.float16) or (dtype == torch.float32 and convolves_in_tf32())


def _weight(convolution: Node) -> torch.Size:
    weight: Any = convolution.args[1 if convolution.target is CONVOLUTIONS[0] else 2]
    return weight.meta["val"].shape


def is_back(node: Node) -> bool:
    """Check whether a node permutes a contiguous tensor with the channels last to an image."""
    if node.target is not aten.permute.default:
        return False
    source: Any = node.args[0]
    fake = source.meta["val"]
    axes = [axis % fake.dim() for axis in node.args[1]]  # type: ignore[union-attr]
    is_image = fake.dim() > 2 and axes == inverse(channels_last(fake.dim()))
    return is_image and is_known(fake) and has_strides(fake, range(fake.dim()))


def is_of_channels(node: Node) -> bool:
    """Check whether a node expands one scalar per channel of an image to all positions."""
    if node.target is not aten.expand.default:
        return False
    source: Any = node.args[0]
    given, result = source.meta["val"], node.meta["val"]
    is_image = given.dim() == result.dim() == 4 and is_known(given) and is_known(result)
    return is_image and tuple(given.shape[2:]) == (1, 1) and known_equal(given.shape[:2], result.shape[:2])


def is_normalized(fake: torch.Tensor, groups: int | None = None) -> bool:
    """Check whether a normalization becomes sums: its image has several channels, and it four elements or more.

    Fewer elements keep their operator, which reads them as rounded to a half type (`read_saved_statistics`).

    Args:
        fake: the image.
        groups: into how many groups the channels of each image are cut; None if each channel of all images is one.
    """
    images, channels, *positions = fake.shape
    if not is_known(fake) or channels < 2:
        return False
    return known_true(math.prod((images if groups is None else channels // groups, *positions)) >= 4)


def viewed(node: Node, inner: Node) -> tuple[Any, tuple[Any, ...], bool] | None:
    """Write a view of an image as a call on its inner node.

    Returns:
        The function to call, the arguments, and whether the result is an image with its channels last rather than the
        view itself. None if there is no such call.
    """
    source: Any = node.args[0]
    rank, shape = source.meta["val"].dim(), node.meta["val"].shape
    order = channels_last(rank)
    if node.target in ALIASES:
        return node.target, (inner,), True
    if node.target in (aten.permute.default, aten.transpose.int):
        axes = [axis % rank for axis in node.args[1]] if node.target is aten.permute.default else list(range(rank))  # type: ignore[union-attr]
        if node.target is aten.transpose.int:
            first, second = (int(axis) % rank for axis in node.args[1:])  # type: ignore[arg-type]
            axes[first], axes[second] = axes[second], axes[first]
        return (aten.alias.default, (inner,), False) if axes == list(order) else None
    if node.target is aten.slice.Tensor:
        axis, *rest = node.args[1:] or (0,)
        return node.target, (inner, order.index(int(axis) % rank), *rest), True  # type: ignore[arg-type]
    if node.target in RESHAPES and all(isinstance(size, int) for size in shape[1:]):
        whole = source.meta["val"].shape
        is_contiguous = has_strides(inner.meta["val"], range(rank))
        if known_equal(shape[:2], whole[:2]) and is_contiguous:
            rows = shape[0] if isinstance(shape[0], int) else -1
            return aten.view.default, (inner, [rows, *shape[2:], shape[1]]), True
    return None
