"""A weight's gradient transposes a matrix once, not anew for each block of columns."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from ort_dynamo.passes.onnx.analysis.new_values import NewValues
from ort_dynamo.passes.onnx.analysis.opsets import is_older
from ort_dynamo.passes.onnx.analysis.refusals import refuse
from ort_dynamo.passes.onnx.analysis.replacing import replace_node
from ort_dynamo.passes.ordering import Condition, ordering
from ort_dynamo.targets.target import OPSET

__all__ = ["TransposeOnce"]

_OPSET = 9
"""The first opset with all operators that the pass writes: a Constant may be the shape of a Reshape."""


@ordering(ends=[Condition.BEFORE_FUSIONS, Condition.NO_DEAD_NODES])
@dataclass(frozen=True)
class TransposeOnce(ir.passes.InPlacePass):
    """Rewrite FusedMatMul(a, b, transA=1) of float32 matrices as a matmul of a transposed copy.

    The gradient of every weight is such a matmul. ONNX Runtime's CPU kernel (MLAS) computes the result in blocks of 128
    columns, and transposes all of `a` for each block. With `a` of k × m and `b` of k × n, both of static sizes and k
    and n at least `min_size`:

    1. If `a` has at most `max_copy` elements, it becomes MatMul(aᵀ, b). That took 0.89 to 0.99 of the time for m and
       n of 384 to 3072 and k of 256 to 4096 (AVX-512, one thread, 1.31.1).
    2. If `a` is larger, such as the gradient of logits over a vocabulary, and m is at least `min_ratio` times n, it
       becomes MatMul(bᵀ, a)ᵀ, which reads the large matrices row by row: 0.76 to 0.91 for m of 8000 to 32000. `b`
       has to be as small as `a` in case 1.

    A Reshape to the same shape keeps ONNX Runtime from fusing the copy into the matmul again (MatmulTransposeFusion).
    Each element is the same sum in the same order. A model of opset 8 or older does not change.
    """

    min_size: int = 256
    max_copy: int = 1 << 22
    min_ratio: int = 8

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite every match in the main graph."""
        if is_older(model, _OPSET):
            return ir.passes.PassResult(model, False)
        new, modified = NewValues(model, self), False
        for node in list(model.graph):
            if not _transposes_first(node):
                continue
            sizes = _sizes(node)
            if sizes is None:
                refuse(self, node, "its operands are no float32 matrices of static sizes")
                continue
            k, m, n = sizes
            swapped = m * k > self.max_copy
            if min(k, n) < self.min_size:
                refuse(self, node, f"a product of {m} x {k} and {k} x {n} is too small")
            elif swapped and (m < self.min_ratio * n or n * k > self.max_copy):
                refuse(self, node, f"the copy of a matrix of {m} x {k} is too large")
            else:
                self._rewrite(new, node, swapped, sizes)
                modified = True
        return ir.passes.PassResult(model, modified)

    def _rewrite(self, new: NewValues, node: ir.Node, swapped: bool, sizes: tuple[int, int, int]) -> None:
        (a, b), old = node.inputs, node.outputs[0]
        k, m, n = sizes
        if swapped:
            a, b, m, n = b, a, n, m
        tape = ir.tape.Tape()
        copy = tape.op("Transpose", [a], {"perm": [1, 0]}, version=OPSET)
        operand = tape.op("Reshape", [copy, new.shape([m, k])], version=OPSET)
        alpha = node.attributes.get_float("alpha", 1.0)
        if alpha == 1:
            result = tape.op("MatMul", [operand, b], version=OPSET)
        else:
            result = tape.op("FusedMatMul", [operand, b], {"alpha": alpha}, domain=node.domain, version=node.version)
        named = [(copy, "copy", [m, k]), (operand, "operand", [m, k])]
        if swapped:
            named.append((result, "transposed", [m, n]))
            result = tape.op("Transpose", [result], {"perm": [1, 0]}, version=OPSET)
        for value, suffix, shape in named:
            value.name, value.shape = new.name(f"{old.name}_{suffix}"), ir.Shape(shape)
            value.type = ir.TensorType(ir.DataType.FLOAT)
        replace_node(node, tape, result, self)


def _transposes_first(node: ir.Node) -> bool:
    """Check for a FusedMatMul that transposes its first operand and nothing else."""
    if node.op_type != "FusedMatMul" or node.domain != "com.microsoft":
        return False
    flags = [node.attributes.get_int(name, 0) for name in ("transA", "transB", "transBatchA", "transBatchB")]
    return flags == [1, 0, 0, 0]


def _sizes(node: ir.Node) -> tuple[int, int, int] | None:
    """Read (k, m, n) off a matmul of aᵀ and b, two matrices of float32 with static sizes; None of other operands."""
    a, b = node.inputs
    if a is None or b is None or a.dtype != ir.DataType.FLOAT:
        return None
    if a.shape is None or b.shape is None or len(a.shape) != 2 or len(b.shape) != 2:
        return None
    if not (a.shape.is_static() and b.shape.is_static()):
        return None
    (k, m), (_, n) = a.shape.numpy(), b.shape.numpy()
    return k, m, n
