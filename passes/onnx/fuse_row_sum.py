"""Replace a sum over leading axes by a matmul with ones."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ort_dynamo.passes.onnx.analysis.constants import constant_of
from ort_dynamo.passes.onnx.analysis.new_values import NewValues
from ort_dynamo.passes.onnx.analysis.refusals import refuse
from ort_dynamo.passes.onnx.analysis.replacing import replace_node
from ort_dynamo.passes.ordering import Condition, ordering
from ort_dynamo.targets.target import OPSET

__all__ = ["FuseRowSum"]


@ordering(ends=[Condition.BEFORE_FUSIONS, Condition.NO_DEAD_NODES])
@dataclass(frozen=True)
class FuseRowSum(ir.passes.InPlacePass):
    """Rewrite ReduceSum over the leading axes of a float32 tensor as MatMul(ones, x), with reshapes if needed.

    The gradient of every bias is such a sum. ONNX Runtime's CPU kernel reads columns; the matmul reads rows and was 2.5
    to 5 times as fast (1024×3072, 1024×512, 16384×64, both tested runtimes).

    The conditions are:

    1. the input is float32 with static dimensions, none of which is 0;
    2. the axes are constant and exactly the leading ones, and at least one axis remains;
    3. at least `min_rows` rows are summed.
    """

    min_rows: int = 16

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite every match in the main graph."""
        new, modified = NewValues(model, self), False
        for node in list(model.graph):
            rows = self._match(node)
            if rows:
                self._rewrite(new, node, rows)
                modified = True
        return ir.passes.PassResult(model, modified)

    def _match(self, node: ir.Node) -> int:
        """Return the number of summed rows, or 0 if the node does not match."""
        if node.op_type != "ReduceSum" or node.domain or len(node.inputs) != 2:
            return 0
        x, axes_value = node.inputs
        axes = constant_of(axes_value)
        if x is None or x.dtype != ir.DataType.FLOAT or x.shape is None or not x.shape.is_static():
            refuse(self, node, "its input is no float32 tensor of static sizes")
            return 0
        if axes is None:
            refuse(self, node, "its axes are not constant")
            return 0
        if 0 in x.shape.numpy():
            refuse(self, node, "its input has no elements")  # the zeros of a Reshape stand for other sizes
            return 0
        rank = len(x.shape)
        leading = sorted(axis % rank for axis in axes) if rank else []
        if not leading or leading != list(range(len(leading))) or len(leading) == rank:
            refuse(self, node, f"axes {list(axes)} of {rank} are not the leading ones, or are all of them")
            return 0
        rows = math.prod(x.shape.numpy()[: len(leading)])
        if rows < self.min_rows:
            refuse(self, node, f"{rows} rows are fewer than {self.min_rows}")
            return 0
        return rows

    def _rewrite(self, new: NewValues, node: ir.Node, rows: int) -> None:
        x, old = node.inputs[0], node.outputs[0]
        assert x is not None
        assert x.shape is not None
        count = len(constant_of(node.inputs[1]) or ())
        kept = x.shape.numpy()[count:]
        columns = math.prod(kept)
        # Ones without a row of their own give a result without one.
        summed = [1] * count if node.attributes.get_int("keepdims", 1) else []
        row = [1] if summed else []
        tape = ir.tape.Tape()
        flat = _reshaped(new, tape, x, [rows, columns], f"{old.name}_row_sum_flat")
        name = "ones_" + "x".join(map(str, (*row, rows)))
        ones = new.shared_constant(name, np.ones((*row, rows), np.float32))
        total = tape.op("MatMul", [ones, flat], version=OPSET)
        total.name, total.type, total.shape = new.name(f"{old.name}_row_sum"), x.type, ir.Shape([*row, columns])
        result = _reshaped(new, tape, total, [*summed, *kept])
        replace_node(node, tape, result, self)


def _reshaped(new: NewValues, tape: ir.tape.Tape, x: ir.Value, sizes: list[int], name: str | None = None) -> ir.Value:
    """`x` with these sizes: itself where it has them."""
    assert x.shape is not None
    if list(x.shape.numpy()) == sizes:
        return x
    reshaped = tape.op("Reshape", [x, new.shape(sizes)], version=OPSET)
    reshaped.name = None if name is None else new.name(name)
    reshaped.type, reshaped.shape = x.type, ir.Shape(sizes)
    return reshaped
