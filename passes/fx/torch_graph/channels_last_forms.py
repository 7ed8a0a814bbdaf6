"""Forms of calls that channels_last asks for: normalizations less the means, and slices for parts of a split.

A group normalization subtracts means before, since the kernel for channels_last cancels digits without that. Torch's
CPU kernel for contiguous images updates a mean and a sum of squared deviations from it. Its kernel for channels_last
computes

    variance = sum(x^2) / n - mean^2

which loses all digits where the mean of a group is much larger than the deviation (Chan, Golub and LeVeque,
"Algorithms for computing the sample variance", 1983, equation 1.5). A normalization of `x - mean` has the same result
and gradients, and cancels nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.fx import Node

from ort_dynamo.graph.boundary import has_strides
from ort_dynamo.graph.marks import HALF
from ort_dynamo.passes.fx.analysis.aliases import aliased_inputs
from ort_dynamo.passes.fx.analysis.saved_tensors import is_random
from ort_dynamo.passes.fx.analysis.storage import fakes_in
from ort_dynamo.torch_internals.kernels.kernel_layouts import IMAGE_OPERATORS
from ort_dynamo.torch_internals.kernels.operators import aten, is_pointwise
from ort_dynamo.torch_internals.sizes.symbols import known_equal, known_true

__all__ = [
    "GROUP_NORM",
    "asks_size",
    "can_center",
    "center",
    "decides_layout",
    "has_sizes_of_images",
    "is_alias",
    "is_kept",
    "is_of_one_expanded",
    "puts_in_order",
    "slice_of",
    "with_views",
]

GROUP_NORM = aten.native_group_norm.default
_GRADIENT = aten.native_group_norm_backward.default
_SPLITS = (aten.split.Tensor, aten.split_with_sizes.default)


def asks_size(node: Node) -> bool:
    """Check whether a node gives a size or the number of elements of a tensor: the same in any layout."""
    return node.target in (aten.sym_size.int, aten.sym_numel.default)


def has_sizes_of_images(node: Node) -> bool:
    """Check that a normalization of groups, or its gradient, is not told to read the memory as other images.

    Its numbers of images and channels are arguments, of which torch checks the product alone. Other nodes have none.
    """
    if node.target not in (GROUP_NORM, _GRADIENT):
        return True
    place, first = (0, 3) if node.target is GROUP_NORM else (1, 5)
    image: Any = node.args[place]
    sizes = [one.meta["val"] if isinstance(one, Node) else one for one in node.args[first : first + 2]]
    return known_equal(sizes, image.meta["val"].shape[:2])  # type: ignore[arg-type]


def can_center(norm: Node) -> bool:
    """Check whether a difference is as exact as its operands: one of half types is rounded to their few digits."""
    image: Any = norm.args[0]
    return image.meta["val"].dtype == torch.float32 and isinstance(norm.args[4], int)


def center(norm: Node, given: Node, add: Callable[..., Node]) -> list[Node]:
    """Normalize an image less the means of its groups, in the forward and in the gradients.

    Where a backward reads the image itself, too, a gradient computes the difference again: not both are saved.

    Args:
        norm: a normalization that `can_center` has accepted.
        given: the image that the program gave it; its operand may be a copy since.
        add: adds a call for a node: that node, the target, the arguments.

    Returns:
        The differences: the image's shape, dtype and strides.
    """
    image, (channels, _, groups) = norm.args[0], norm.args[4:7]
    with norm.graph.inserting_before(norm):
        mean = shift = add(norm, aten.mean.dim, (image, [2, 3], True))
        if groups != channels:
            rows = add(norm, aten.view.default, (mean, [-1, groups, channels // groups]))  # type: ignore[operator]
            mean = add(norm, aten.mean.dim, (rows, [2], True))
            wide = add(norm, aten.expand.default, (mean, [-1, -1, channels // groups]))  # type: ignore[operator]
            ordered = add(norm, aten.clone.default, (wide,), {"memory_format": torch.contiguous_format})
            shift = add(norm, aten.view.default, (ordered, [-1, channels, 1, 1]))
        differences = [add(norm, aten.sub.Tensor, (image, shift))]
    norm.update_arg(0, differences[0])
    for result in [result for result in norm.users if result.args[1] == 1]:
        gradients = [one for one in result.users if one.target is _GRADIENT and one.args[1:3] == (given, result)]
        is_saved = image is given and is_kept(image, gradients)
        for gradient in gradients:
            if is_saved:
                with norm.graph.inserting_before(gradient):
                    differences.append(add(gradient, aten.sub.Tensor, (image, shift)))
            gradient.update_arg(1, differences[-1])
        if len(gradients) < len(result.users):
            with norm.graph.inserting_before(result.next):
                flat = add(norm, aten.view.default, (mean, [-1, groups]))
                total = add(norm, aten.add.Tensor, (result, flat))
            own = {total, *gradients}
            result.replace_all_uses_with(total, lambda user, own=own: user not in own)  # type: ignore[misc]
    return differences


def is_kept(image: Node, own: Collection[Node]) -> bool:
    """Check whether an image stays in memory until the backward: an input, or read there by others than `own`."""
    base = image
    while base.target is not operator.getitem and (sources := aliased_inputs(base)):
        base = sources[0]
    readers = {user for one in with_views(base) for user in one.users if user not in own}
    return base.op == "placeholder" or any("backward" in one.meta.get(HALF, "") for one in readers)


def decides_layout(image: Node, reader: Node) -> bool:
    """Check whether a kernel goes by strides of an image that fake tensors do not know, and its results tell.

    An image of one channel or of one position has the strides of several layouts. Kernels of pointwise operators give
    it those of a contiguous one; a convolution and a concatenation read them as a wish for the layout of their results.
    A copy in channels_last has the strides of that layout.
    """
    if reader.target not in IMAGE_OPERATORS or image.kwargs.get("memory_format") is torch.channels_last:
        return False
    return _is_of_one(image.meta["val"]) and not all(map(_is_of_one, fakes_in(reader.meta["val"])))


def _is_of_one(fake: torch.Tensor) -> bool:
    """Check whether an image has one channel or one position; tensors of other ranks count as such."""
    if fake.dim() != 4:
        return True
    return known_true(fake.shape[1] == 1) or known_equal(fake.shape[2:], (1, 1))


def slice_of(part: Node) -> tuple[Node, int, int, int] | None:
    """Give the arguments of the slice that a part of a split is; None for another node, and for symbolic sizes."""
    if part.target is not operator.getitem:
        return None
    split: Any = part.args[0]
    index: Any = part.args[1]
    if split.target not in _SPLITS:
        return None
    source, sizes, axis = (*split.args, 0)[:3]
    if isinstance(sizes, int):
        return source, axis, index * sizes, (index + 1) * sizes
    if not isinstance(sizes, (list, tuple)) or not all(isinstance(size, int) for size in sizes):
        return None
    start = sum(sizes[:index])
    return source, axis, start, start + sizes[index]


def is_of_one_expanded(node: Node) -> bool:
    """Check whether a node is a pointwise op whose only input is an expanded tensor; all copies get one value."""
    given, result = node.args[0] if node.args else None, node.meta.get("val")
    return (
        is_pointwise(node.target)
        and node.target is not aten.clone.default
        and len(node.all_input_nodes) == 1
        and not is_random(node)
        and isinstance(given, Node)
        and given.target is aten.expand.default
        and isinstance(result, torch.Tensor)
        and has_strides(result, range(result.dim()))
    )


def is_alias(node: Node) -> bool:
    """Check whether a node is a view of a tensor's own shape, which a tensor of any strides allows."""
    source: Any = node.args[0] if node.args else None
    return node.target is aten.view.default and known_equal(node.meta["val"].shape, source.meta["val"].shape)


def puts_in_order(node: Node) -> bool:
    """Check whether a node is a copy in contiguous order."""
    return node.target is aten.clone.default and node.kwargs == {"memory_format": torch.contiguous_format}


def with_views(node: Node) -> list[Node]:
    """Return a node and all views of its results: in their fake values, they share memory with its own."""
    views = [user for user in node.users if user.op == "call_function" and node in aliased_inputs(user)]
    return [node, *(one for view in views for one in with_views(view))]
