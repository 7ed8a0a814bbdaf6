"""Tells casts between floating-point types apart."""

from __future__ import annotations

import onnx_ir as ir

__all__ = ["is_narrowing", "is_widening"]


def is_narrowing(node: ir.Node) -> bool:
    """Check whether a node casts floats to a narrower type: it rounds them. Unknown types are no such cast."""
    sizes = _float_sizes(node)
    return sizes is not None and sizes[0] > sizes[1]


def is_widening(node: ir.Node) -> bool:
    """Check whether a node casts floats to a wider type. Unknown types are no such cast."""
    sizes = _float_sizes(node)
    return sizes is not None and sizes[0] < sizes[1]


def _float_sizes(node: ir.Node) -> tuple[float, float] | None:
    """Return the bytes of an element before and after a cast between floating-point types."""
    if node.op_type != "Cast" or node.domain or node.inputs[0] is None:
        return None
    before, after = node.inputs[0].dtype, node.outputs[0].dtype
    if before is None or after is None or not (before.is_floating_point() and after.is_floating_point()):
        return None
    return before.itemsize, after.itemsize
