"""Counts the multiplications of a node, by the sizes of its fake values."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Node

from ort_dynamo.torch_internals.operators import aten
from ort_dynamo.torch_internals.symbols import hints

__all__ = ["CONVOLUTIONS", "convolution_weight", "is_depthwise", "is_product", "multiplications"]

CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)

_PRODUCTS = frozenset(
    {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten._grouped_mm.default}
)


def convolution_weight(node: Node) -> torch.Tensor:
    """Give the fake weight of one of CONVOLUTIONS."""
    index = 1 if node.target is aten.convolution.default else 2
    weight: torch.Tensor = node.args[index].meta["val"]  # type: ignore[union-attr]
    return weight


def is_product(node: Node) -> bool:
    """Whether a convolution is a product of matrices: its windows have one element, or do not overlap."""
    rest = node.args[3:] if node.target is aten.convolution.default else node.args[4:]
    stride, padding, dilation, transposed, _, groups = rest[:6]
    kernel = tuple(convolution_weight(node).shape[2:])
    if groups != 1 or any(padding):  # type: ignore[arg-type]
        return False
    is_apart = _filled(stride, kernel) == kernel and all(one == 1 for one in dilation) and not transposed  # type: ignore[union-attr]
    return is_apart or all(size == 1 for size in kernel)


def _filled(given: Any, kernel: tuple[Any, ...]) -> tuple[Any, ...]:
    """One number for each dimension, where one may stand for all."""
    return tuple(given) * len(kernel) if len(given) == 1 else tuple(given)


def is_depthwise(node: Node) -> bool:
    """Whether a convolution takes each channel by itself."""
    return bool(convolution_weight(node).shape[1] == 1)


def multiplications(node: Node) -> int:
    """Count those of a product of matrices or a convolution, of the example's sizes; 0 of any other node.

    A size that no example is known of counts as 1.
    """
    if node.target in CONVOLUTIONS:
        weight = _sizes(convolution_weight(node))
        if node.target is aten.convolution_backward.default:
            output, times = node.args[0].meta["val"], sum(node.args[-1][:2])  # type: ignore[union-attr, arg-type, misc]
        else:
            output, times = node.meta["val"], 1
        transposed = bool(node.args[6 if node.target is aten.convolution.default else 7])
        # Transposed, each element of the input, not of the output, meets the whole kernel.
        windows = node.args[0 if node.target is aten.convolution.default else 1].meta["val"] if transposed else output  # type: ignore[union-attr]
        batch, _, *places = _sizes(windows)
        return times * batch * math.prod(places) * math.prod(weight)
    if node.target in _PRODUCTS:
        factors = [one for one in node.all_input_nodes if isinstance(one.meta.get("val"), torch.Tensor)]
        inner = _sizes(factors[-1].meta["val"])[-2]
        return math.prod(_sizes(node.meta["val"])) * inner
    return 0


def _sizes(fake: torch.Tensor) -> list[int]:
    return [1 if size is None else int(size) for size in hints(fake.shape)]
