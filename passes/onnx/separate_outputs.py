"""Give every graph output a value of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from ort_dynamo.graph.marks import PASS
from ort_dynamo.passes.onnx.analysis.new_values import NewValues
from ort_dynamo.passes.onnx.analysis.opsets import is_older
from ort_dynamo.passes.ordering import Condition, ordering
from ort_dynamo.targets.target import OPSET

__all__ = ["SeparateOutputs"]

_IDENTITY_SINCE: Mapping[type, int] = {ir.SequenceType: 14, ir.OptionalType: 16}
"""Kind of a value -> the first opset whose Identity takes it; tensors: any."""


@ordering(gives=[Condition.OUTPUTS_SEPARATE])
@dataclass(frozen=True)
class SeparateOutputs(ir.passes.InPlacePass):
    """Replace an output that is another output, an input or an initializer by an Identity of it.

    Clean-up passes merge equal values, outputs included. ONNX forbids two outputs with one name. torch's outputs must
    not alias each other or inputs, since the program may write to them. Sequences before opset 14, and optional values
    before opset 16, stay: no Identity takes them. A replaced output gets another name, such as y_copy_0.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite the main graph's outputs."""
        graph, new, seen, modified = model.graph, NewValues(model, self), set[ir.Value](), False
        for index, value in enumerate(graph.outputs):
            copyable = not is_older(model, _IDENTITY_SINCE.get(type(value.type), 1))
            if copyable and (value in seen or value.is_graph_input() or value.is_initializer()):
                node = ir.node("Identity", [value], version=OPSET, metadata_props={PASS: repr(self)})
                (copy,) = node.outputs
                copy.name, copy.type, copy.shape = new.name(f"{value.name}_copy_{index}"), value.type, value.shape
                graph.append(node)
                graph.outputs[index] = copy
                modified = True
            seen.add(value)
        return ir.passes.PassResult(model, modified)
