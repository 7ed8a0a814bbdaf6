"""Batch normalization in training, and group normalization, of channels_last images as sums and arithmetic.

Fused kernels compute sums over rows and arithmetic. A batch normalization computes mean and variance of a channel in
one pass over the image, after subtracting a shift s from its elements:

    mean = s + sum(x - s) / n
    variance = sum((x - s)^2) / n - (mean - s)^2

With s = 0 the difference of the last line cancels all digits if the mean is much larger than the deviation (Chan,
Golub and LeVeque, "Algorithms for computing the sample variance", 1983, equation 1.5). Here s is the mean of k
elements of the channel in the first image. So (mean - s)^2 is at most n / k variances, and about 1 / k for random
data.

A group normalization takes two passes: here s is the mean of the group, whose sum has lost some digits. Each image has
a sum for each channel, and these are added for each group.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from ort_dynamo.passes.fx.analysis.fake_values import add_call
from ort_dynamo.passes.fx.analysis.size_nodes import SizeNodes
from ort_dynamo.torch_internals.kernels.operators import OpOverload, aten, present

__all__ = [
    "FORWARD",
    "GRADIENTS",
    "GROUP_NORM",
    "GROUP_NORM_GRADIENT",
    "Gradients",
    "Normalized",
    "gradients_of",
    "group_gradients_of",
    "group_normalized",
    "normalized",
]

_HALF = (torch.bfloat16, torch.float16)
_SHIFT_ROWS = 128
"""Positions of the first image that a shift is the mean of, for a half type: one program sums so many."""


class Normalized(NamedTuple):
    """Results of a normalization.

    Attributes:
        image: the normalized image in channels_last, in the image's dtype.
        mean: the mean of each channel, shape (channels,), or of each image's groups, shape (images, groups); in
            float32, or float64 for a float64 image. The next three have the same shape and dtype.
        deviation: one over the deviation, with eps.
        running: the new running mean and variance; None without running statistics.
    """

    image: Node
    mean: Node
    deviation: Node
    running: tuple[Node, Node] | None = None


class Gradients(NamedTuple):
    """Gradients of a normalization, each None if it is not needed.

    Attributes:
        image: the gradient of the image, in channels_last and the image's dtype.
        weight: the gradient of the weight, shape (channels,).
        bias: the gradient of the bias, shape (channels,).
    """

    image: Node | None
    weight: Node | None
    bias: Node | None


class _Forward(NamedTuple):
    """Indices of the arguments of a normalization, and of its results beside the first three.

    Attributes:
        running: index of the running mean, before that of the running variance; None without running statistics.
        trains: index of the training flag; None if it is always set.
        momentum: index of the momentum; eps follows.
        new: index of the new running mean among the results.
    """

    running: int | None
    trains: int | None
    momentum: int
    new: int | None


FORWARD: Mapping[OpOverload, _Forward] = present(
    {
        aten._native_batch_norm_legit_functional.default: _Forward(3, 5, 6, 3),
        aten._native_batch_norm_legit.no_stats: _Forward(None, 3, 4, None),
        aten._batch_norm_with_update_functional.default: _Forward(3, None, 5, 4),
    }
)
"""Normalization -> where its arguments stand."""

GRADIENTS: frozenset[OpOverload] = frozenset(
    present(dict.fromkeys((aten.native_batch_norm_backward.default, aten.batch_norm_backward.default)))
)
"""Its gradients: (gradient, image, weight, running mean, running variance, mean, deviation, trains, eps, wanted, …)."""


GROUP_NORM = aten.native_group_norm.default
"""A group normalization: (image, weight, bias, images, channels, positions, groups, eps)."""

GROUP_NORM_GRADIENT = aten.native_group_norm_backward.default
"""Its gradient: (gradient, image, mean, deviation, weight, images, channels, positions, groups, wanted)."""


class _Builder:
    """Adds calls where the graph inserts, with one node's metadata on its origin."""

    def __init__(self, like: Node, meta: Mapping[str, Any]) -> None:
        self._graph, self._meta = like.graph, meta

    def __call__(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        return add_call(self._graph, target, args, kwargs, self._meta)

    def to(self, value: Node, dtype: torch.dtype) -> Node:
        return value if value.meta["val"].dtype == dtype else self(aten._to_copy.default, value, dtype=dtype)

    def rows(self, image: Node) -> int | Node:
        """Return the number of positions of an image, channels last; a node that holds it if the batch is symbolic."""
        rows = math.prod(image.meta["val"].shape[:-1])
        if isinstance(rows, int):
            return rows  # the nodes of sizes need not be sought
        found = SizeNodes(self._graph, self._meta).number(rows)
        assert found is not None
        return found

    def number(self, function: Callable[[Any, Any], Any], first: Any, second: Any) -> Any:
        """Apply a function of numbers; the result is a node if one of them is."""
        is_known = not any(isinstance(one, Node) for one in (first, second))
        return function(first, second) if is_known else self(function, first, second)

    def sum(self, value: Node) -> Node:
        """Over all axes but the last."""
        return self(aten.sum.dim_IntList, value, [*range(value.meta["val"].dim() - 1)])


def normalized(node: Node, image: Node, meta: Mapping[str, Any]) -> Normalized:
    """Add a normalization, where the graph inserts.

    Args:
        node: calls an operator of FORWARD, and trains.
        image: the image to normalize, channels last; contiguous, with several positions. Its batch may be symbolic.
        meta: the metadata of the calls.
    """
    add, places = _Builder(node, meta), FORWARD[node.target]  # type: ignore[index]
    _, weight, bias, *_ = node.args
    momentum, eps = node.args[places.momentum : places.momentum + 2]
    fake = image.meta["val"]
    rows, wide = add.rows(image), _wide(fake.dtype)
    share = add.number(operator.truediv, 1, rows)
    x = add.to(image, wide)
    shift = _shift(add, image, wide)
    less = add(aten.sub.Tensor, x, shift)
    first = add(aten.mul.Tensor, add.sum(less), share)
    second = add(aten.mul.Tensor, add.sum(add(aten.mul.Tensor, less, less)), share)
    mean = add(aten.add.Tensor, shift, first)
    variance = add(aten.relu.default, add(aten.sub.Tensor, second, add(aten.mul.Tensor, first, first)))
    deviation = add(aten.rsqrt.default, add(aten.add.Tensor, variance, eps))
    result = add(aten.mul.Tensor, add(aten.sub.Tensor, x, mean), deviation)
    for target, operand in ((aten.mul.Tensor, weight), (aten.add.Tensor, bias)):
        result = result if operand is None else add(target, result, add.to(operand, wide))  # type: ignore[arg-type]
    running = None
    if places.running is not None:
        old = node.args[places.running : places.running + 2]
        unbiased = add.number(operator.truediv, rows, add.number(operator.sub, rows, 1))
        new = (mean, add(aten.mul.Tensor, variance, unbiased))
        running = tuple(_moved(add, *both, momentum) for both in zip(old, new, strict=True))
    return Normalized(add.to(result, fake.dtype), mean, deviation, running)  # type: ignore[arg-type]


def _shift(add: _Builder, image: Node, wide: torch.dtype) -> Node:
    """Return the mean of the first image, or for a half type of its first positions."""
    fake = image.meta["val"]
    count = math.prod(fake.shape[1:-1])
    rows = count
    if isinstance(fake.shape[0], int):
        rows *= fake.shape[0]
    else:
        image = add(aten.slice.Tensor, image, 0, 0, 1)
    if fake.dtype in _HALF:
        count = next(one for one in range(min(count, _SHIFT_ROWS), 0, -1) if rows % one == 0)
    flat = add(aten.view.default, image, [rows, fake.shape[-1]])
    total = add.sum(add.to(add(aten.slice.Tensor, flat, 0, 0, count), wide))
    return add(aten.mul.Tensor, total, 1 / count)


def _moved(add: _Builder, old: Any, new: Node, momentum: Any) -> Node:
    """Update a running statistic with a new value."""
    dtype = old.meta["val"].dtype
    new = add.to(new, torch.promote_types(new.meta["val"].dtype, dtype))
    old = add.to(old, new.meta["val"].dtype)
    kept, moved = (add(aten.mul.Tensor, one, factor) for one, factor in ((old, 1 - momentum), (new, momentum)))
    return add.to(add(aten.add.Tensor, kept, moved), dtype)


def gradients_of(
    node: Node, gradient: Node, image: Node, mean: Node, deviation: Node, meta: Mapping[str, Any]
) -> Gradients:
    """Add the gradients of a normalization at the graph's insertion point.

    Args:
        node: a call of an operator of GRADIENTS, in training mode.
        gradient: the gradient of the normalized image, in channels_last.
        image: the image in channels_last; its batch may be symbolic.
        mean: the mean of each channel.
        deviation: one over the deviation, with eps.
        meta: the metadata of the calls.
    """
    add = _Builder(node, meta)
    weight, wanted = node.args[2], node.args[9]
    fake = image.meta["val"]
    wide = _wide(fake.dtype)
    mean, deviation, g, x = (add.to(one, wide) for one in (mean, deviation, gradient, image))
    scaled = add(aten.mul.Tensor, add(aten.sub.Tensor, x, mean), deviation)
    total, along = add.sum(g), add.sum(add(aten.mul.Tensor, g, scaled))
    given: Sequence[Any] = wanted  # type: ignore[assignment]
    of_image = None
    if given[0]:
        # Compute on whole activations, so that no kernel is for the channels alone.
        share = add(aten.add.Tensor, add(aten.mul.Tensor, scaled, along), total)
        mean_of_share = add(aten.mul.Tensor, share, add.number(operator.truediv, 1, add.rows(image)))
        left = add(aten.sub.Tensor, g, mean_of_share)
        left = add(aten.mul.Tensor, left, deviation)
        left = left if weight is None else add(aten.mul.Tensor, left, add.to(weight, wide))  # type: ignore[arg-type]
        of_image = add.to(left, fake.dtype)
    dtype = wide if weight is None else weight.meta["val"].dtype  # type: ignore[union-attr]
    return Gradients(of_image, add.to(along, dtype) if given[1] else None, add.to(total, dtype) if given[2] else None)


def group_normalized(node: Node, image: Node, meta: Mapping[str, Any]) -> Normalized:
    """Add a group normalization, where the graph inserts.

    Args:
        node: calls GROUP_NORM.
        image: the image to normalize, channels last and contiguous. Its batch may be symbolic.
        meta: the metadata of the calls.
    """
    _, weight, bias, *_, eps = node.args
    groups = _Groups(node, image, node.args[6], meta)
    add, wide = groups.add, groups.wide
    x = groups.cut(add.to(image, wide))
    first = groups.mean(groups.each(x))
    less = add(aten.sub.Tensor, x, groups.spread(first))
    second, squares = (groups.mean(groups.each(one)) for one in (less, add(aten.mul.Tensor, less, less)))
    mean = add(aten.add.Tensor, first, second)
    variance = add(aten.relu.default, add(aten.sub.Tensor, squares, add(aten.mul.Tensor, second, second)))
    deviation = add(aten.rsqrt.default, add(aten.add.Tensor, variance, eps))
    centred = add(aten.sub.Tensor, less, groups.spread(second))
    result = add(aten.mul.Tensor, centred, groups.spread(deviation))
    for target, operand in ((aten.mul.Tensor, weight), (aten.add.Tensor, bias)):
        result = result if operand is None else add(target, result, groups.of_channels(operand))
    return Normalized(add.to(groups.joined(result), image.meta["val"].dtype), mean, deviation)


def group_gradients_of(
    node: Node, gradient: Node, image: Node, mean: Node, deviation: Node, meta: Mapping[str, Any]
) -> Gradients:
    """Add the gradients of a group normalization at the graph's insertion point.

    With y = (x - mean) * deviation * weight + bias and the normalized image s = (x - mean) * deviation, the gradient of
    x is deviation * (g * weight - mean of (g * weight) - s * mean of (g * weight * s)), with means over each group.

    Args:
        node: a call of GROUP_NORM_GRADIENT.
        gradient: the gradient of the normalized image, in channels_last.
        image: the image in channels_last; its batch may be symbolic.
        mean: the mean of each group, shape (images, groups).
        deviation: one over the deviation, with eps, of the same shape.
        meta: the metadata of the calls.
    """
    weight, wanted = node.args[4], node.args[9]
    groups = _Groups(node, image, node.args[8], meta)
    add, wide = groups.add, groups.wide
    mean, deviation = (groups.spread(add.to(one, wide)) for one in (mean, deviation))
    g, x = (groups.cut(add.to(one, wide)) for one in (gradient, image))
    scaled = add(aten.mul.Tensor, add(aten.sub.Tensor, x, mean), deviation)
    total, along = groups.each(g), groups.each(add(aten.mul.Tensor, g, scaled))
    given: Sequence[Any] = wanted  # type: ignore[assignment]
    of_image = None
    if given[0]:
        weighted = [total, along]
        if weight is not None:
            scale = groups.of_channels(weight)
            g, *weighted = (add(aten.mul.Tensor, one, scale) for one in (g, *weighted))
        first, second = (groups.spread(groups.mean(one)) for one in weighted)
        left = add(aten.sub.Tensor, add(aten.sub.Tensor, g, first), add(aten.mul.Tensor, scaled, second))
        of_image = add.to(groups.joined(add(aten.mul.Tensor, left, deviation)), image.meta["val"].dtype)
    dtype = wide if weight is None else weight.meta["val"].dtype  # type: ignore[union-attr]
    of_weight, of_bias = (
        add.to(groups.of_all_images(one), dtype) if is_wanted else None
        for one, is_wanted in zip((along, total), given[1:], strict=True)
    )
    return Gradients(of_image, of_weight, of_bias)


class _Groups:
    """Adds views of an image whose channels are cut into groups, and sums of the groups.

    Attributes:
        add: adds calls.
        wide: the dtype of the arithmetic.
    """

    def __init__(self, node: Node, image: Node, groups: Any, meta: Mapping[str, Any]) -> None:
        self.add = _Builder(node, meta)
        images, *self._positions, channels = image.meta["val"].shape
        self._images = images if isinstance(images, int) else -1
        self.wide = _wide(image.meta["val"].dtype)
        self._groups = [groups, channels // groups]

    def cut(self, image: Node) -> Node:
        """Return a view of an image: (images, positions …, groups, channels of a group)."""
        return self.add(aten.view.default, image, [self._images, *self._positions, *self._groups])

    def joined(self, image: Node) -> Node:
        """Return a cut image as it was."""
        return self.add(aten.view.default, image, [self._images, *self._positions, math.prod(self._groups)])

    def of_channels(self, value: Any) -> Node:
        """Return a view of a weight or bias that fits a cut image."""
        return self.add(aten.view.default, self.add.to(value, self.wide), self._groups)

    def each(self, image: Node) -> Node:
        """Sum a cut image over its positions, if it has such axes: (images, groups, channels of a group)."""
        axes = [*range(1, 1 + len(self._positions))]
        return self.add(aten.sum.dim_IntList, image, axes) if axes else image

    def of_all_images(self, sums: Node) -> Node:
        """Add the sums of all images: (channels,)."""
        return self.add(aten.view.default, self.add(aten.sum.dim_IntList, sums, [0]), [math.prod(self._groups)])

    def mean(self, sums: Node) -> Node:
        """Return the mean of each group from the sums of its channels: (images, groups)."""
        groups, width = self._groups
        is_one = width == 1
        total = (aten.view.default, [self._images, groups]) if is_one else (aten.sum.dim_IntList, [2])
        return self.add(aten.mul.Tensor, self.add(total[0], sums, total[1]), 1 / math.prod((width, *self._positions)))

    def spread(self, value: Node) -> Node:
        """Return a view of a number of each group that fits a cut image."""
        return self.add(aten.view.default, value, [self._images, *(1 for _ in self._positions), self._groups[0], 1])


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in _HALF else dtype
