"""Forms of calls that channels_last asks for: normalizations less the means, and slices for parts of a split.

A group normalization subtracts means before, since the kernel for channels_last cancels digits without that. Torch's
CPU kernel for contiguous images updates a mean and a sum of squared deviations from it. Its kernel for channels_last
computes

    variance = sum(x^2) / n - mean^2

which loses all digits where the mean of a group is much larger than the deviation (Chan, Golub and LeVeque,
"Algorithms for computing the sample variance", 1983, equation 1.5). A normalization of `x - mean` has the same result
and gradients, and cancels nothing.

An instance normalization, which torch calls as a batch normalization of a view (1, images * channels, height, width),
becomes sums over positions and arithmetic in either layout: with d = x - mean, r = 1 / sqrt(mean(d^2) + eps) and n
positions,

    y = d * (r * weight) + bias
    gradient of x = (r * weight) * (g - sum(g) / n - d * r^2 * sum(g * d) / n)

A sum in float32 makes a mean wrong in its last bits, and torch's kernel adds in float64. So the mean of `x - mean` is
subtracted, too. That of one image follows channels_last as it is.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

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
    "change_forms",
    "decides_layout",
    "has_sizes_of_images",
    "is_alias",
    "is_of_one_expanded",
    "puts_in_order",
    "slice_of",
    "with_views",
]

GROUP_NORM = aten.native_group_norm.default
_GRADIENT = aten.native_group_norm_backward.default
_INSTANCE_NORM = aten._native_batch_norm_legit.no_stats
_SPLITS = (aten.split.Tensor, aten.split_with_sizes.default)


def change_forms(graph: Graph, add: Callable[..., Node]) -> bool:
    """Sum instance normalizations, and let views skip views that they undo; `add` adds a call for a node."""
    sums = [_sum_instance_norm(node, add) for node in tuple(graph.nodes)]
    skips = [_skip_views(node) for node in tuple(graph.nodes)]
    return any(sums) or any(skips)


def _skip_views(view: Node) -> bool:
    """Let a view read the tensor that views before it reshape, if it has the shape and the strides of that tensor.

    A functional graph has such views where a program writes to an instance normalization, whose result is a view.
    """
    source: Any = view
    skipped: list[Node] = []
    while source.target is aten.view.default:
        source = source.args[0]
        fake, own = view.meta["val"], source.meta["val"]
        if skipped and known_equal([*own.shape, *own.stride()], [*fake.shape, *fake.stride()]):
            view.update_arg(0, source)
            for one in (one for one in skipped if not one.users):
                view.graph.erase_node(one)
            return True
        skipped.append(source)
    return False


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
        is_saved = image is given and _is_kept(image, gradients)
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


class _InstanceNorm(NamedTuple):
    """An instance normalization and its gradients.

    Attributes:
        image: the image, contiguous; float32 or float64.
        results: the normalized image, or views of it, with the image's shape.
        gradients: each gradient's call, with the gradient of the result, and those of the image, in the image's shape.
    """

    image: Node
    results: list[Node]
    gradients: list[tuple[Node, Node, list[Node]]]


def _sum_instance_norm(norm: Node, add: Callable[..., Node]) -> bool:
    """Compute an instance normalization and its gradients by sums over positions; give False for another node.

    Args:
        norm: any node.
        add: adds a call for a node: that node, the target, the arguments.
    """
    found = _instance_norm(norm)
    if found is None:
        return False
    image, eps = found.image, norm.args[5]
    channels = image.meta["val"].shape[1]
    with norm.graph.inserting_before(norm):
        weight, bias = (
            one if one is None else add(norm, aten.view.default, (one, [-1, channels, 1, 1])) for one in norm.args[1:3]
        )
        less, means = image, []
        for _ in range(2):
            means.append(add(norm, aten.mean.dim, (less, [2, 3], True)))
            less = add(norm, aten.sub.Tensor, (less, means[-1]))
        square = add(norm, aten.mul.Tensor, (less, less))
        variance = add(norm, aten.add.Tensor, (add(norm, aten.mean.dim, (square, [2, 3], True)), eps))
        scale = rate = add(norm, aten.rsqrt.default, (variance,))
        if weight is not None:
            scale = add(norm, aten.mul.Tensor, (rate, weight))
        if bias is None:
            result = add(norm, aten.mul.Tensor, (less, scale))
        else:
            result = add(norm, aten.addcmul.default, (bias, less, scale))
    for one in found.results:
        one.replace_all_uses_with(result)
    is_saved = _is_kept(image, own := [gradient for gradient, _, _ in found.gradients])
    for gradient, given, results in found.gradients:
        with norm.graph.inserting_before(gradient):
            same = image if is_saved else less
            for mean in means if is_saved else ():
                same = add(gradient, aten.sub.Tensor, (same, mean))
            _add_gradients(gradient, given, same, variance, rate, weight, results, add)
    for call in (*own, norm):
        read: Any = call.args[0]
        _erase(call)
        if not read.users:
            norm.graph.erase_node(read)
    return True


def _add_gradients(
    gradient: Node,
    given: Node,
    less: Node,
    variance: Node,
    rate: Node,
    weight: Node | None,
    of_image: list[Node],
    add: Callable[..., Node],
) -> None:
    """Compute the gradients of an instance normalization, and replace those of a call with them.

    Args:
        gradient: the call.
        given: the gradient of the normalized image.
        less: the image less its means.
        variance: the variance of each channel of each image, with eps.
        rate: one over its root.
        weight: the weight, broadcast to `rate`.
        of_image: the gradients of the image.
        add: adds a call for a node.
    """
    product = add(gradient, aten.mul.Tensor, (given, less))
    along, total = (add(gradient, aten.sum.dim_IntList, (one, [2, 3], True)) for one in (product, given))
    if of_image:
        scale = rate if weight is None else add(gradient, aten.mul.Tensor, (rate, weight))
        share = add(gradient, aten.mul.Tensor, (scale, -1 / math.prod(less.meta["val"].shape[2:])))
        shift = add(gradient, aten.mul.Tensor, (total, share))
        factor = add(gradient, aten.mul.Tensor, (add(gradient, aten.div.Tensor, (along, variance)), share))
        image = add(gradient, aten.addcmul.default, (shift, less, factor))
        image = add(gradient, aten.addcmul.default, (image, given, scale))
        for one in of_image:
            one.replace_all_uses_with(image)
    for item in gradient.users:
        if item.args[1] != 0 and item.users:
            vector = total if item.args[1] == 2 else add(gradient, aten.mul.Tensor, (along, rate))
            item.replace_all_uses_with(add(gradient, aten.view.default, (vector, [-1])))


def _is_kept(image: Node, own: Collection[Node]) -> bool:
    """Check whether an image stays in memory until the backward: an input, or read there by others than `own`."""
    base = image
    while base.target is not operator.getitem and (sources := aliased_inputs(base)):
        base = sources[0]
    readers = {user for one in with_views(base) for user in one.users if user not in own}
    return base.op == "placeholder" or any("backward" in one.meta.get(HALF, "") for one in readers)


def _erase(node: Node) -> None:
    """Erase a call with its results and their views, which nothing reads."""
    for user in tuple(node.users):
        _erase(user)
    node.graph.erase_node(node)


def _instance_norm(norm: Node) -> _InstanceNorm | None:
    """Recognise an instance normalization, all results of which are read as images or by its gradients."""
    if norm.target is not _INSTANCE_NORM or norm.args[3] is not True:
        return None
    image = _images_of(norm.args[0])
    if image is None or not _can_sum(image.meta["val"]) or not _has_plain_numbers(norm, image.meta["val"].dtype):
        return None
    items = {item.args[1]: item for item in norm.users}
    results = _as_images(items.get(0), image)
    if results is None:
        return None
    gradients = []
    for call in dict.fromkeys(user for index, item in items.items() if index != 0 for user in item.users):
        if call.target is not aten.native_batch_norm_backward.default or call.args[1:3] != norm.args[:2]:
            return None
        given = _images_of(call.args[0])
        of_image = _as_images(next((item for item in call.users if item.args[1] == 0), None), image)
        if call.args[5:9] != (items.get(1), items.get(2), True, norm.args[5]) or given is None or of_image is None:
            return None
        if not known_equal(given.meta["val"].shape, image.meta["val"].shape):
            return None
        gradients.append((call, given, of_image))
    return _InstanceNorm(image, results, gradients)


def _images_of(view: Any) -> Node | None:
    """Return the images whose view (1, images * channels, height, width) is given."""
    if view.target is not aten.view.default:
        return None
    images: Node = view.args[0]
    count, *size = images.meta["val"].shape
    if len(size) != 3 or not known_equal(view.meta["val"].shape, [1, count * size[0], *size[1:]]):
        return None
    return images


def _can_sum(fake: torch.Tensor) -> bool:
    """Check for several contiguous images of several channels and positions: arithmetic keeps their layout."""
    count, *size = fake.shape
    if not all(isinstance(one, int) for one in size) or not known_true(count > 1):
        return False
    is_plain = size[0] > 1 and math.prod(size[1:]) > 1 and has_strides(fake, range(4))
    return is_plain and fake.dtype in (torch.float32, torch.float64)


def _has_plain_numbers(norm: Node, dtype: torch.dtype) -> bool:
    """Check that weight and bias have a dtype, for torch raises on others, and that eps is at least its smallest.

    Where variance and eps are 0, torch gives 0 for one over the root.
    """
    eps, vectors = norm.args[5], (one for one in norm.args[1:3] if isinstance(one, Node))
    is_plain = isinstance(eps, (int, float)) and eps >= torch.finfo(dtype).tiny
    return is_plain and all(one.meta["val"].dtype == dtype for one in vectors)


def _as_images(result: Node | None, image: Node) -> list[Node] | None:
    """Give a result, or all views of it, with the shape of an image; None where another shape is read."""
    if result is None:
        return []
    shape, readers = image.meta["val"].shape, list(result.users)
    if all(one.target is aten.view.default and known_equal(one.meta["val"].shape, shape) for one in readers):
        return readers
    return [result] if known_equal(result.meta["val"].shape, shape) else None


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
