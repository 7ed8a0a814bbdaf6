"""Two casts in a row become one."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir.traversal import RecursiveGraphIterator

from ort_dynamo.graph.marks import PASS
from ort_dynamo.passes.ordering import Condition, ordering

__all__ = ["FoldCasts"]

D = ir.DataType

_LOSSLESS: dict[D, frozenset[D]] = {
    D.BOOL: frozenset({D.INT8, D.UINT8, D.INT16, D.INT32, D.INT64, D.FLOAT16, D.BFLOAT16, D.FLOAT, D.DOUBLE}),
    D.INT8: frozenset({D.INT16, D.INT32, D.INT64, D.FLOAT16, D.BFLOAT16, D.FLOAT, D.DOUBLE}),
    D.UINT8: frozenset({D.INT16, D.INT32, D.INT64, D.FLOAT16, D.BFLOAT16, D.FLOAT, D.DOUBLE}),
    D.INT16: frozenset({D.INT32, D.INT64, D.FLOAT, D.DOUBLE}),
    D.INT32: frozenset({D.INT64, D.DOUBLE}),
    D.FLOAT16: frozenset({D.FLOAT, D.DOUBLE}),
    D.BFLOAT16: frozenset({D.FLOAT, D.DOUBLE}),
    D.FLOAT: frozenset({D.DOUBLE}),
}
"""dtype -> dtypes that hold each of its values exactly (bfloat16 has 8 significant bits, float16 11, float32 24)."""


@ordering(ends=[Condition.CASTS_OF_EACH])
@dataclass(frozen=True)
class FoldCasts(ir.passes.InPlacePass):
    """Cast(a -> b) then Cast(b -> c) becomes Cast(a -> c) where b holds every value of a; where c is a, both go.

    A cast that loses something stays: float32 -> bfloat16 -> float32 is a rounding. A cast to strings stays: a double
    has more digits than the equal float. The first cast stays for its other consumers.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite every graph of the model."""
        modified = False
        for node in list(RecursiveGraphIterator(model.graph)):
            modified |= self._fold(node)
        return ir.passes.PassResult(model, modified)

    def _fold(self, second: ir.Node) -> bool:
        if not _is_cast(second) or _gives_strings(second):
            return False
        if (first := second.inputs[0]) is None or (node := first.producer()) is None:
            return False
        if not _is_cast(node) or (source := node.inputs[0]) is None or source.dtype is None:
            return False
        if first.dtype not in _LOSSLESS.get(source.dtype, ()):
            return False
        (result,) = second.outputs
        if source.dtype != result.dtype:
            second.replace_input_with(0, source)
            second.metadata_props[PASS] = repr(self)
            return True
        if result.is_graph_output():
            return False  # an output keeps its name; an Identity would cost as much as the cast
        ir.convenience.replace_all_uses_with(result, source)
        assert second.graph is not None
        second.graph.remove(second, safe=True)
        return True


def _is_cast(node: ir.Node) -> bool:
    return node.op_type == "Cast" and not node.domain


def _gives_strings(cast: ir.Node) -> bool:
    to = cast.attributes.get("to")
    return to is not None and to.value in (D.STRING, "STRING")  # a dtype is its name before opset 6
