"""Strides of a graph's outputs as eager's kernels give them, where dimensions have one element.

Such a stride tells nothing about memory, and fake tensors do not always promise eager's. Programs can see it, and
DistributedDataParallel compares it between a gradient and its parameter.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, TypeGuard

import torch
from torch.fx import Graph, Node

from ort_dynamo.torch_internals.kernels.iterator_strides import (
    Layout,
    contiguous_strides,
    elementwise_strides,
    is_dense,
)
from ort_dynamo.torch_internals.kernels.kernel_layouts import (
    BROADCAST,
    CONTIGUOUS,
    CONVOLUTIONS,
    LAID_OUT_AS,
    follows_layout,
)
from ort_dynamo.torch_internals.kernels.operators import aten, present, schema_of
from ort_dynamo.torch_internals.kernels.view_operators import VIEWS

__all__ = ["has_dimension_of_one", "returned_strides"]

_LIKE = frozenset(
    present(
        dict.fromkeys(
            (
                *(aten.empty_like.default, aten.full_like.default, aten.ones_like.default, aten.zeros_like.default),
                *(aten.rand_like.default, aten.randn_like.default, aten.randint_like.default),
                *(aten.clone.default, aten._to_copy.default, aten.flip.default, aten.hardtanh.default),
                *(aten.nan_to_num.default, aten.sort.default, aten.sort.stable, aten.addr.default),
                *(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor, aten.index_put.default),
                *(aten.select_scatter.default, aten.slice_scatter.default, aten.huber_loss.default),
            )
        )
    )
)
"""Operators whose result has the strides of the first operand, if this is dense and has the result's shape."""

_WRAPS_NUMBERS = frozenset(
    ("add", "sub", "rsub", "mul", "div", "eq", "ne", "lt", "le", "gt", "ge", "remainder", "fmod", "floor_divide")
) | frozenset(f"bitwise_{name}" for name in ("and", "or", "xor", "left_shift", "right_shift"))
"""Elementwise operators that make a tensor of a scalar: a second operand, of another shape than the first."""


def returned_strides(graph: Graph) -> dict[int, tuple[int, ...]]:
    """Find the outputs of a traced graph whose strides eager's kernels are known to give: index -> strides.

    Of static shapes with a dimension of one element, and of elementwise operators, copies, convolutions and views.

    Args:
        graph: an inference or a joint graph, as it was traced.
    """
    (output,) = graph.find_nodes(op="output")
    wanted = {
        index: node
        for index, node in enumerate(output.args[0])
        if isinstance(node, Node) and has_dimension_of_one(node.meta.get("val"))
    }
    if not wanted:
        return {}
    known: dict[Node, tuple[int, ...]] = {}
    for node in graph.nodes:
        if node.op == "call_function" and _is_near_one(node):
            strides = _strides(node, known)
            if strides is not None and _agree(node.meta["val"], strides):
                known[node] = strides
    return {index: known[node] for index, node in wanted.items() if node in known}


def _strides(node: Node, known: Mapping[Node, tuple[int, ...]]) -> tuple[int, ...] | None:
    """Give the strides of a node's result by those of its operands; None for operators without a rule."""
    fake, target = node.meta["val"], node.target
    if _is_convolutions(node):
        return tuple(fake.stride())
    if target is operator.getitem:
        (node,), target = node.all_input_nodes, node.all_input_nodes[0].target
        if target not in _LIKE:
            return None
    operands = [_layout(one, known) for one in node.all_input_nodes]
    layouts = [one for one in operands if one is not None]
    if len(layouts) < len(operands) or not layouts:
        return None
    if target in VIEWS:
        return _view(node, layouts[0])
    sizes = tuple(fake.shape)
    if target in _LIKE:
        if node.kwargs.get("memory_format") not in (None, torch.preserve_format):
            return None
        return layouts[0][1] if layouts[0][0] == sizes and is_dense(layouts[0]) else None
    if target in CONTIGUOUS:
        return contiguous_strides(sizes)
    if not (follows_layout(target) or target in BROADCAST or LAID_OUT_AS.get(target) == 0):  # type: ignore[call-overload]
        return None
    name = schema_of(target).name.rpartition("::")[2]  # type: ignore[arg-type]
    numbers = sum(not isinstance(one, Node) for one in node.args[:2]) if name in _WRAPS_NUMBERS else 0
    return elementwise_strides(sizes, [*layouts, *[((), ())] * numbers])


def _agree(fake: torch.Tensor, strides: tuple[int, ...]) -> bool:
    """Check whether strides are a fake tensor's in all dimensions of several elements. No rule is right otherwise."""
    return all(size == 1 or own == other for size, own, other in zip(fake.shape, fake.stride(), strides, strict=True))


def _is_near_one(node: Node) -> bool:
    """Check whether a node makes a tensor of fixed sizes, and this or an operand has a dimension of one element."""
    values = [one.meta.get("val") for one in (node, *node.all_input_nodes)]
    return isinstance(values[0], torch.Tensor) and _is_static(values[0]) and any(map(has_dimension_of_one, values))


def _layout(node: Node, known: Mapping[Node, tuple[int, ...]]) -> Layout | None:
    fake = node.meta.get("val")
    if not isinstance(fake, torch.Tensor) or not _is_static(fake):
        return None
    return tuple(fake.shape), known.get(node) or tuple(fake.stride())


def _view(node: Node, layout: Layout) -> tuple[int, ...] | None:
    """Make the same view of a tensor with the strides of the operand."""
    if any(isinstance(one, Node) for one in node.args[1:]):
        return None
    operand = torch.empty_strided(*layout, device="meta")
    made: Any = node.target(operand, *node.args[1:], **node.kwargs)  # type: ignore[operator]
    return tuple(made.stride())


def _is_convolutions(node: Node) -> bool:
    """Check whether a node is a result of a convolution, or of the gradient of one."""
    maker = node.all_input_nodes[0] if node.target is operator.getitem else node
    return maker.target in CONVOLUTIONS


def _is_static(fake: torch.Tensor) -> bool:
    if fake.layout is not torch.strided:
        return False
    return not any(isinstance(number, torch.SymInt) for number in (*fake.shape, *fake.stride()))


def has_dimension_of_one(fake: object) -> TypeGuard[torch.Tensor]:
    """Check whether a value is a tensor of fixed sizes, and one of them is one."""
    return isinstance(fake, torch.Tensor) and _is_static(fake) and any(size == 1 for size in fake.shape)
