"""Instance normalizations as sums over positions and arithmetic, or as group normalizations.

torch calls one as a batch normalization of a view (1, images * channels, height, width), which images in channels_last
do not allow. With d = x - mean, r = 1 / sqrt(mean(d^2) + eps) and n positions,

    y = d * (r * weight) + bias
    gradient of x = (r * weight) * (g - sum(g) / n - d * r^2 * sum(g * d) / n)

A sum in float32 makes a mean wrong in its last bits, and torch's kernel adds in float64. So the mean of `x - mean` is
subtracted, too. The batch normalization of one image follows channels_last as it is.

It is also a group normalization with a group for each channel, and arithmetic with a weight and a bias for each channel
of each image.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from ort_dynamo.graph.boundary import has_strides
from ort_dynamo.graph.marks import RECOMPUTE
from ort_dynamo.passes.fx.torch_graph.channels_last_forms import is_kept
from ort_dynamo.torch_internals.kernels.operators import aten
from ort_dynamo.torch_internals.sizes.symbols import known_equal, known_true

__all__ = ["group_instance_norms", "sum_instance_norms"]

_INSTANCE_NORM = aten._native_batch_norm_legit.no_stats
_SAVED = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)


def sum_instance_norms(graph: Graph, add: Callable[..., Node]) -> bool:
    """Compute the instance normalizations of a graph by sums, and let views skip views that they undo.

    Args:
        graph: a graph that torch runs.
        add: adds a call for a node: that node, the target, the arguments.
    """
    norms = graph.find_nodes(op="call_function", target=_INSTANCE_NORM)
    sums = [_sum_instance_norm(norm, add) for norm in norms]
    skips = [_skip_views(view) for view in graph.find_nodes(op="call_function", target=aten.view.default)]
    return any(sums) or any(skips)


def group_instance_norms(graph: Graph, add: Callable[..., Node]) -> None:
    """Compute the instance normalizations of a graph as group normalizations of float32 or float64 images.

    Args:
        graph: a joint or inference graph.
        add: adds a call for a node: that node, the target, the arguments, and keyword arguments.
    """
    for norm in graph.find_nodes(op="call_function", target=_INSTANCE_NORM):
        found = _instance_norm(norm, _can_group)
        if found is not None:
            _group_instance_norm(norm, found, add)


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


class _InstanceNorm(NamedTuple):
    """An instance normalization and its gradients.

    Attributes:
        image: the image, contiguous.
        results: the normalized image, or views of it, with the image's shape.
        gradients: each gradient's call, with the gradient of the result, and those of the image, in the image's shape.
    """

    image: Node
    results: list[Node]
    gradients: list[tuple[Node, Node, list[Node]]]


def _sum_instance_norm(norm: Node, add: Callable[..., Node]) -> bool:
    """Compute an instance normalization and its gradients by sums over positions; give False for another batch norm.

    Args:
        norm: a call of _INSTANCE_NORM.
        add: adds a call for a node: that node, the target, the arguments.
    """
    found = _instance_norm(norm, _can_sum)
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
    is_saved = is_kept(image, own := [gradient for gradient, _, _ in found.gradients])
    for gradient, given, results in found.gradients:
        with norm.graph.inserting_before(gradient):
            same = image if is_saved else less
            for mean in means if is_saved else ():
                same = add(gradient, aten.sub.Tensor, (same, mean))
            _add_gradients(gradient, given, same, variance, rate, weight, results, add)
    _erase_all((*own, norm))
    return True


class _Grouped(NamedTuple):
    """A group normalization that stands for an instance normalization.

    Attributes:
        image: the image, in float32 or float64, as the others.
        result: the normalized image, without weight and bias.
        mean: the mean of each channel, shape (images, channels).
        deviation: one over the deviation, of the same shape.
        weight: the weight, broadcast to the image, or None.
        sizes: arguments of the normalization: images (a node if their number is symbolic), channels, positions, groups.
    """

    image: Node
    result: Node
    mean: Node
    deviation: Node
    weight: Node | None
    sizes: tuple[Any, ...]


def _group_instance_norm(norm: Node, found: _InstanceNorm, add: Callable[..., Node]) -> None:
    fake = found.image.meta["val"]
    count, channels, *positions = fake.shape
    wide = torch.promote_types(fake.dtype, torch.float32)
    with norm.graph.inserting_before(norm):
        images = count if isinstance(count, int) else add(norm, aten.sym_size.int, (found.image, 0))
        sizes = (images, channels, math.prod(positions), channels)
        weight, bias = (
            one
            if one is None
            else _cast(norm, add(norm, aten.view.default, (_once(one), [-1, channels, 1, 1])), wide, add)
            for one in norm.args[1:3]
        )
        image = _cast(norm, found.image, wide, add)
        call = add(norm, aten.native_group_norm.default, (image, None, None, *sizes, norm.args[5]))
        normed, mean, deviation = (add(norm, operator.getitem, (call, index)) for index in range(3))
        result = normed if weight is None else add(norm, aten.mul.Tensor, (normed, weight))
        result = result if bias is None else add(norm, aten.add.Tensor, (result, bias))
        result = _cast(norm, result, fake.dtype, add)
    for one in found.results:
        one.replace_all_uses_with(result)
    grouped = _Grouped(image, normed, mean, deviation, weight, sizes)
    for gradient, given, of_image in found.gradients:
        with norm.graph.inserting_before(gradient):
            _group_gradients(gradient, given, grouped, of_image, add)
    _erase_all((*(gradient for gradient, _, _ in found.gradients), norm))


def _group_gradients(
    gradient: Node, given: Node, grouped: _Grouped, of_image: list[Node], add: Callable[..., Node]
) -> None:
    """Replace the gradients of an instance normalization with those of a group normalization.

    Args:
        gradient: the call that gives them.
        given: the gradient of the normalized image.
        grouped: the group normalization.
        of_image: the gradients of the image.
        add: adds a call for a node.
    """
    image, normed, mean, deviation, weight, sizes = grouped
    given = _cast(gradient, given, image.meta["val"].dtype, add)
    if of_image:
        scaled = given if weight is None else add(gradient, aten.mul.Tensor, (given, weight))
        args = (scaled, image, mean, deviation, None, *sizes, [True, False, False])
        made = add(gradient, aten.native_group_norm_backward.default, args)
        made = _cast(gradient, add(gradient, operator.getitem, (made, 0)), of_image[0].meta["val"].dtype, add)
        for one in of_image:
            one.replace_all_uses_with(made)
    for item in gradient.users:
        if item.args[1] != 0 and item.users:
            vector = given if item.args[1] == 2 else add(gradient, aten.mul.Tensor, (given, normed))
            vector = add(gradient, aten.sum.dim_IntList, (vector, [2, 3]))
            vector = _cast(gradient, vector, item.meta["val"].dtype, add)
            item.replace_all_uses_with(add(gradient, aten.view.default, (vector, [-1])))


def _cast(node: Node, value: Node, dtype: torch.dtype, add: Callable[..., Node]) -> Node:
    """Return a value in a dtype; the cast belongs to a node."""
    is_same = value.meta["val"].dtype == dtype
    return value if is_same else add(node, aten._to_copy.default, (value,), dtype=dtype)


def _once(vector: Any) -> Any:
    """Return the vector that is repeated for each image, or a vector of other numbers as it is."""
    return vector.args[0] if vector.target is aten.repeat.default and len(vector.args[1]) == 1 else vector


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


def _erase_all(calls: Iterable[Node]) -> None:
    """Erase calls with their results, and the views that nothing but they read."""
    for call in calls:
        read: Any = call.args[0]
        _erase(call)
        if not read.users:
            call.graph.erase_node(read)


def _erase(call: Node) -> None:
    """Erase a call with its results and their views. It raises an error if a view is read."""
    results = tuple(call.users)
    for node in (*(view for result in results for view in result.users), *results, call):
        call.graph.erase_node(node)


def _instance_norm(norm: Node, accepts: Callable[[torch.Tensor], bool]) -> _InstanceNorm | None:
    """Recognise an instance normalization of an image that is accepted; all results are images or for its gradients.

    A policy that has its results saved would have those of each sum saved, too.
    """
    if norm.args[3] is not True or norm.meta.get(RECOMPUTE) in _SAVED:
        return None
    image = _images_of(norm.args[0])
    if image is None or not accepts(image.meta["val"]) or not _has_plain_numbers(norm, image.meta["val"].dtype):
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
    return _has_more(fake, 1) and has_strides(fake, range(4)) and fake.dtype in (torch.float32, torch.float64)


def _can_group(fake: torch.Tensor) -> bool:
    """Check for several images of several channels and positions; a symbolic number of images is at least 1."""
    return _has_more(fake, 1 if isinstance(fake.shape[0], int) else 0) and fake.dtype.is_floating_point


def _has_more(fake: torch.Tensor, images: int) -> bool:
    """Check for more than so many images of several channels and positions, whose numbers are static."""
    count, *size = fake.shape
    if not all(isinstance(one, int) for one in size) or not known_true(count > images):
        return False
    return size[0] > 1 and math.prod(size[1:]) > 1


def _has_plain_numbers(norm: Node, dtype: torch.dtype) -> bool:
    """Check that weight and bias have a dtype that torch takes, and that eps is at least the smallest of float32.

    Where variance and eps are 0, torch gives 0 for one over the root.
    """
    eps, vectors = norm.args[5], (one for one in norm.args[1:3] if isinstance(one, Node))
    wide = torch.promote_types(dtype, torch.float32)
    is_plain = isinstance(eps, (int, float)) and eps >= torch.finfo(wide).tiny
    return is_plain and all(one.meta["val"].dtype in (dtype, wide) for one in vectors)


def _as_images(result: Node | None, image: Node) -> list[Node] | None:
    """Give a result, or all views of it, with the shape of an image; None where another shape is read."""
    if result is None:
        return []
    shape, readers = image.meta["val"].shape, list(result.users)
    if all(one.target is aten.view.default and known_equal(one.meta["val"].shape, shape) for one in readers):
        return readers
    return [result] if known_equal(result.meta["val"].shape, shape) else None
