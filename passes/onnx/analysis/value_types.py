"""Infers types and shapes of values that a model does not state."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass

__all__ = ["infer_missing_types"]

_LIKE_THEIR_FIRST_INPUT = frozenset({"BiasGelu", "FastGelu", "Gelu", "QuickGelu"})
"""com.microsoft operators, unknown to ONNX's inference, whose output has the first input's type and shape."""


def infer_missing_types(model: ir.Model, *, shapes: bool = False) -> None:
    """Give types and shapes to values without a type; inputs and outputs of graphs keep theirs.

    A model whose values all have types does not change. Values that inference cannot type stay untyped.

    Args:
        model: the model.
        shapes: also give shapes to values that have a type but no shape.
    """
    if not _is_lacking(model, shapes):
        return
    graphs = [model.graph, *model.graph.subgraphs()]
    stated = [(value, value.type, value.shape) for graph in graphs for value in [*graph.inputs, *graph.outputs]]
    infer = ShapeInferencePass(check_type=False, strict_mode=False, data_prop=not shapes)  # a value of 50 MB takes 4 s
    infer(model)
    while _infer_contrib_nodes(model):
        infer(model)
    for value, type_, shape in stated:
        if type_ is not None:
            value.type, value.shape = type_, shape


def _is_lacking(model: ir.Model, shapes: bool) -> bool:
    values = [value for node in model.graph.all_nodes() for value in node.outputs if value.name]
    return any(value.type is None or (shapes and value.shape is None) for value in values)


def _infer_contrib_nodes(model: ir.Model) -> bool:
    """Type the results of the operators above for typed inputs; False where there is nothing to do."""
    changed = False
    for node in model.graph.all_nodes():
        if node.domain != "com.microsoft" or node.op_type not in _LIKE_THEIR_FIRST_INPUT:
            continue
        source, (result, *_) = node.inputs[0], node.outputs
        if source is None or source.type is None:
            continue
        if result.type is None or (result.shape is None and source.shape is not None):
            result.type, result.shape, changed = ir.TensorType(source.dtype or ir.DataType.FLOAT), source.shape, True
    return changed
