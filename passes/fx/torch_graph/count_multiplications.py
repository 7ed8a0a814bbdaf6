"""Counts the multiplications of a node, by the sizes of its fake values."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from ort_dynamo.torch_internals.kernels.kernel_layouts import CONVOLUTIONS
from ort_dynamo.torch_internals.kernels.operators import aten
from ort_dynamo.torch_internals.sizes.symbols import hints

__all__ = [
    "CONVOLUTIONS",
    "PRODUCTS",
    "convolution_weight",
    "convolves_images",
    "example_sizes",
    "is_depthwise",
    "is_product",
    "multiplications",
    "weighs_more_than_images",
]


PRODUCTS = {
    aten.mm.default: 0,
    aten.bmm.default: 0,
    aten._grouped_mm.default: 0,
    aten.addmm.default: 1,
    aten.baddbmm.default: 1,
}
"""Matmuls -> which argument is the left factor."""


def convolution_weight(node: Node) -> torch.Tensor:
    """Give the fake weight of one of CONVOLUTIONS."""
    weight: torch.Tensor = _arguments(node).weight.meta["val"]
    return weight


def convolves_images(node: Node) -> bool:
    """Check whether a node is a two-dimensional convolution or the gradient of one."""
    return node.target in CONVOLUTIONS and convolution_weight(node).dim() == 4


class _Arguments(NamedTuple):
    """The arguments that both operators of CONVOLUTIONS take."""

    image: Any
    weight: Any
    stride: Any
    padding: Any
    dilation: Any
    transposed: Any
    groups: Any


def _arguments(node: Node) -> _Arguments:
    args: Any = node.args
    if node.target is aten.convolution.default:
        image, weight, _, stride, padding, dilation, transposed, _, groups = args
    else:
        _, image, weight, _, stride, padding, dilation, transposed, _, groups, _ = args
    return _Arguments(image, weight, stride, padding, dilation, transposed, groups)


def is_product(node: Node) -> bool:
    """Check whether a convolution is one matmul: its windows have one element, or they do not overlap."""
    given = _arguments(node)
    kernel = tuple(convolution_weight(node).shape[2:])
    if given.groups != 1 or any(given.padding):
        return False
    is_apart = _filled(given.stride, kernel) == kernel and all(one == 1 for one in given.dilation)
    return (is_apart and not given.transposed) or all(size == 1 for size in kernel)


def _filled(given: Any, kernel: tuple[Any, ...]) -> tuple[Any, ...]:
    """Repeat a single size for each dimension, if only one is given."""
    return tuple(given) * len(kernel) if len(given) == 1 else tuple(given)


def is_depthwise(node: Node) -> bool:
    """Check whether a convolution is depthwise: each channel is convolved by itself."""
    return bool(convolution_weight(node).shape[1] == 1)


def weighs_more_than_images(node: Node) -> bool:
    """Check whether a convolution's weight has more elements than its activations, by the example's sizes."""
    given = _arguments(node)
    weight, images = (example_elements(one.meta["val"]) for one in (given.weight, given.image))
    return weight > images


def multiplications(node: Node) -> int:
    """Count those of a matmul or a convolution, of the example's sizes; 0 of any other node.

    A size that no example is known of counts as 1.
    """
    if node.target in CONVOLUTIONS:
        given, args = _arguments(node), list[Any](node.args)
        is_forward = node.target is aten.convolution.default
        output = node.meta["val"] if is_forward else args[0].meta["val"]
        gradients = 1 if is_forward else sum(args[-1][:2])
        # Transposed, each element of the input, not of the output, meets the whole kernel.
        batch, _, *places = example_sizes(given.image.meta["val"] if given.transposed else output)
        return gradients * batch * math.prod(places) * example_elements(convolution_weight(node))
    if node.target in PRODUCTS:
        left: Any = node.args[PRODUCTS[node.target]]
        return example_elements(node.meta["val"]) * example_sizes(left.meta["val"])[-1]
    return 0


def example_sizes(fake: torch.Tensor) -> list[int]:
    """Return the sizes of the example; one that no example is known of is 1."""
    return [1 if size is None else int(size) for size in hints(fake.shape)]


def example_elements(fake: torch.Tensor) -> int:
    """Count the elements of a tensor, by the example's sizes."""
    return math.prod(example_sizes(fake))
