"""Take shapes of the input of a cast, not of its result."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir.traversal import RecursiveGraphIterator

from ort_dynamo.graph.marks import PASS
from ort_dynamo.passes.ordering import Condition, ordering

__all__ = ["TakeShapesEarly"]


@ordering(needs=[Condition.CASTS_MOVED], ends=[Condition.NO_DEAD_NODES])
@dataclass(frozen=True)
class TakeShapesEarly(ir.passes.InPlacePass):
    """Rewrite Shape(Cast(x)) as Shape(x); a cast that nothing else reads is then dead.

    ONNX Runtime's optimizer of the same effect, PreShapeNodeElimination, is left out where it breaks graphs.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite every graph of the model."""
        modified = False
        for node in RecursiveGraphIterator(model.graph):
            if node.op_type != "Shape" or node.domain:
                continue
            while (source := _cast_operand(node.inputs[0])) is not None:
                node.replace_input_with(0, source)
                node.metadata_props[PASS] = repr(self)
                modified = True
        return ir.passes.PassResult(model, modified)


def _cast_operand(value: ir.Value | None) -> ir.Value | None:
    cast = value.producer() if value is not None else None
    return cast.inputs[0] if cast is not None and cast.op_type == "Cast" and not cast.domain else None
