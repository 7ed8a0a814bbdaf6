"""Infers types and shapes of values that a model does not state."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass

__all__ = ["infer_missing_types"]

_LIKE_THEIR_FIRST_INPUT = frozenset({"BiasGelu", "FastGelu", "Gelu", "QuickGelu"})
"""com.microsoft operators, unknown to ONNX's inference, whose output has the first input's type and shape."""


def infer_missing_types(model: ir.Model) -> None:
    """Give types and shapes to values that have no type; inputs and outputs of graphs keep what they state.

    Nothing happens to a model whose values all have types. Values that inference cannot type stay as they are.
    """
    if not _untyped(model):
        return
    graphs = [model.graph, *model.graph.subgraphs()]
    stated = [(value, value.type, value.shape) for graph in graphs for value in [*graph.inputs, *graph.outputs]]
    infer = ShapeInferencePass(check_type=False, strict_mode=False)
    infer(model)
    while _type_contrib_nodes(model):
        infer(model)
    for value, type_, shape in stated:
        if type_ is not None:
            value.type, value.shape = type_, shape


def _untyped(model: ir.Model) -> bool:
    return any(v.type is None and v.name for node in model.graph.all_nodes() for v in node.outputs)


def _type_contrib_nodes(model: ir.Model) -> bool:
    """Type what the operators above make of typed values; False where there is nothing to do."""
    changed = False
    for node in model.graph.all_nodes():
        if node.domain != "com.microsoft" or node.op_type not in _LIKE_THEIR_FIRST_INPUT:
            continue
        source, (result, *_) = node.inputs[0], node.outputs
        if source is not None and source.type is not None and result.type is None:
            result.type, result.shape, changed = ir.TensorType(source.dtype or ir.DataType.FLOAT), source.shape, True
    return changed
