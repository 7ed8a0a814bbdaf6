"""A fused kernel stops at an index that is out of range, and at nothing else."""

from __future__ import annotations

import base64

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest
from generated_graphs import as_numpy, as_torch
from test_fuse_kernels import HEADER, kernel_results, with_kernels
from triton_interpreter import InterpreterFailedError, interpret

from ort_dynamo.graph.fused_op import DOMAIN
from ort_dynamo.graph.marks import STOPS
from ort_dynamo.passes.onnx.fuse_kernels import FuseKernels, fused_kernels, fused_ops
from ort_dynamo.runtime.kernels.fused_kernel import CompiledKernel
from ort_dynamo.runtime.kernels.kernel_compiler import compile_kernels, triton_version

needs_triton = pytest.mark.skipif(triton_version() is None, reason="there is no Triton")

LOOKUP = """g (float[9, 4] table, int32[3, 700] i) => (float[3, 700, 4] y)
  <int64 zero = {0}, int64 size = {9}, int64 far = {2147483647}> {
  w = Cast<to=7>(i)  below = Less(w, zero)  beyond = GreaterOrEqual(w, size)  wrong = Or(below, beyond)
  where = Where(wrong, far, w)
  y = Gather<axis=0>(table, where)
}"""
OF_ROWS = """g (float[6, 40] x, int64[6, 1] i) => (float[6, 1] y)
  <int64 zero = {0}, int64 size = {40}, int64 far = {2147483647}, int64[1] one = {1}> {
  e = Exp(x)  s = ReduceSum<keepdims=1>(e, one)  l = Log(s)  p = Sub(x, l)
  below = Less(i, zero)  beyond = GreaterOrEqual(i, size)  wrong = Or(below, beyond)  where = Where(wrong, far, i)
  y = GatherElements<axis=1>(p, where)
}"""


def stopping(text: str) -> ir.Model:
    """The fused model of a text whose Where nodes stop."""
    model = ir.from_proto(onnx.parser.parse_model(HEADER + text))
    for node in model.graph:
        if node.op_type == "Where":
            node.metadata_props[STOPS] = "1"
    FuseKernels()(model)
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    return model


def kernel_of(model: ir.Model) -> ir.Node:
    (node,) = (node for node in model.graph if node.domain == DOMAIN and fused_kernels(model)[node.op_type].stops)
    return node


RIGHT = np.resize(np.arange(9, dtype=np.int32), (3, 700))


def test_right_indices_pass() -> None:
    model = stopping(LOOKUP)
    assert len(list(model.graph)) == 2
    node = kernel_of(model)
    (found,) = kernel_results(fused_kernels(model)[node.op_type], [RIGHT])
    np.testing.assert_array_equal(found, RIGHT)


@pytest.mark.parametrize("wrong", [-1, 9, -(1 << 31), (1 << 31) - 1])
def test_a_wrong_index_stops_the_kernel(wrong: int) -> None:
    model = stopping(LOOKUP)
    indices = RIGHT.copy()
    indices[2, 699] = wrong
    with pytest.raises(IndexError, match="out of range"):
        kernel_results(fused_kernels(model)[kernel_of(model).op_type], [indices])


def test_the_function_makes_a_wrong_index_too_large() -> None:
    model = stopping(LOOKUP)
    indices = RIGHT.copy()
    indices[0, :2] = -1, 9
    del model.graph.outputs[:]
    (gather,) = (node for node in model.graph if node.op_type == "Gather")
    where = gather.inputs[1]
    assert where is not None
    model.graph.outputs.append(where)
    model.graph.remove(gather)
    expected = np.where((indices < 0) | (indices > 8), 2147483647, indices)
    np.testing.assert_array_equal(with_kernels(model, {"i": indices}, body=True)[str(where.name)], expected)


def test_no_kernel_of_rows_stops() -> None:
    """Its masks leave out elements that are not read."""
    model = stopping(OF_ROWS)
    kernels = fused_kernels(model)
    assert any(kernel.has_row_numbers for kernel in kernels.values())
    assert all(not kernel.columns for kernel in kernels.values() if kernel.stops)
    assert kernel_of(model)


def test_only_marked_lookups_stop() -> None:
    model = ir.from_proto(onnx.parser.parse_model(HEADER + LOOKUP))
    FuseKernels()(model)
    assert not any(kernel.stops for kernel in fused_kernels(model).values())


@needs_triton
@pytest.mark.parametrize("place", [(0, 0), (1, 350), (2, 699)])
def test_the_source_stops_as_well(place: tuple[int, int]) -> None:
    model = stopping(LOOKUP)
    (op,) = fused_ops(model)
    assert op.source.count(", mask)") >= 2, "neither a load nor the assertion looks beyond the end"
    (found,) = interpret(op, [as_torch(RIGHT)])  # whose last program has 924 places beyond the end, filled with 77
    np.testing.assert_array_equal(as_numpy(found), RIGHT)
    indices = RIGHT.copy()
    indices[place] = 9
    with pytest.raises(InterpreterFailedError, match="an index is out of range"):
        interpret(op, [as_torch(indices)])


@needs_triton
def test_the_compiled_kernel_has_the_assertion() -> None:
    def code(text: str) -> bytes:
        (found,) = compile_kernels([*fused_ops(stopping(text))], (9, 0)).values()
        assert isinstance(found, CompiledKernel), found
        return base64.b64decode(found.aligned.cubin) if isinstance(found.aligned.cubin, str) else found.aligned.cubin

    assert b"__assertfail" in code(LOOKUP)
    plain = "g (int64[9] a, int64[9] b) => (int64[9] y) { y = BitwiseAnd(a, b) }"
    assert b"__assertfail" not in code(plain)
