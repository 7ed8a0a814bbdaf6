"""The sizes and numbers of a kernel: dimensions of its inputs, also of several symbols, and numbers on the host."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from generated_graphs import as_numpy, as_torch
from test_fuse_kernels import HEADER, kernel_results, with_kernels
from triton_interpreter import interpret

from ort_dynamo.graph.fused_op import DOMAIN, ITSELF, fused_ops_from_json, fused_ops_to_json
from ort_dynamo.graph.marks import NUMBER
from ort_dynamo.passes.onnx.fuse_kernels import FuseKernels, fused_kernels, fused_ops
from ort_dynamo.passes.onnx.fused_kernels.kernel import HostNumber, Kernel, Load
from ort_dynamo.runtime.kernels.kernel_compiler import triton_version

MIXED = """g (int64[N, M] i, float[S] x, int64 limit) => (bool[N, M] y) {
  far = GreaterOrEqual(i, limit)  near = Less(i, limit)  far_too = Not(near)  y = And(far, far_too)
}"""
OF_A_TABLE = """g (float[T, 4] table, int64[N, M] i) => (bool[N, M] y)
  <int64[1] axis = {0}, int64 none = {-1}> {
  shape = Shape<start=0, end=1>(table)  size = Squeeze(shape, axis)  least = Mul(size, none)
  far = GreaterOrEqual(i, size)  below = Less(i, least)  y = Or(far, below)
}"""
FLAT = """g (float[R, 6] x, float[R, 6] z) => (float[R, 6] y) { e = Exp(x)  m = Mul(e, z)  y = Add(m, x) }"""


def fused(text: str, *numbers: str) -> ir.Model:
    """The fused model of a text in which these inputs are numbers."""
    model = ir.from_proto(onnx.parser.parse_model(HEADER + text))
    for value in model.graph.inputs:
        if value.name in numbers:
            value.meta[NUMBER] = True
    FuseKernels()(model)
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    return model


def the_kernel(model: ir.Model) -> Kernel:
    (kernel,) = fused_kernels(model).values()
    return kernel


INDICES = np.arange(-6, 9).reshape(3, 5)


@pytest.mark.parametrize("is_number", [True, False])
def test_a_number_that_a_session_is_fed_is_no_load(is_number: bool) -> None:
    kernel = the_kernel(model := fused(MIXED, *["limit"] * is_number))
    assert any(isinstance(step, HostNumber) for step in kernel.steps) == is_number
    assert sum(isinstance(step, Load) for step in kernel.steps) == (1 if is_number else 2)
    assert (ITSELF in [axis for _, axis in kernel.symbols]) == is_number
    (node,) = (node for node in model.graph if node.domain == DOMAIN)
    given = {"i": INDICES, "limit": np.array(2)}
    (found,) = kernel_results(kernel, [given[value.name] for value in node.inputs])
    np.testing.assert_array_equal(found, INDICES >= 2)
    inputs = {**given, "x": np.zeros(3, np.float32)}
    np.testing.assert_array_equal(with_kernels(model, inputs, body=True)["y"], INDICES >= 2)


def test_the_size_of_a_tensor_that_the_kernel_does_not_read_is_a_number() -> None:
    model = fused(OF_A_TABLE)
    kernel = the_kernel(model)
    assert sum(isinstance(step, HostNumber) for step in kernel.steps) == 2  # the size, and its negative
    assert sum(isinstance(step, Load) for step in kernel.steps) == 1
    given = {"table": np.zeros((4, 4), np.float32), "i": INDICES}
    expected = (INDICES >= 4) | (INDICES < -4)
    for body in (False, True):
        np.testing.assert_array_equal(with_kernels(model, given, body=body)["y"], expected)


@pytest.mark.skipif(triton_version() is None, reason="there is no Triton")
def test_its_source_gets_the_number_as_a_parameter() -> None:
    (op,) = fused_ops(fused(MIXED, "limit"))
    (found,) = interpret(
        op, [as_torch(INDICES if dtype == 7 and not place else np.array(2)) for place, dtype in enumerate(op.inputs)]
    )
    np.testing.assert_array_equal(as_numpy(found), INDICES >= 2)


def test_a_stored_operator_keeps_its_numbers() -> None:
    ops = fused_ops(fused(MIXED, "limit"))
    assert fused_ops_from_json(fused_ops_to_json(ops)) == ops
    assert ops[0].numbers


@pytest.mark.parametrize("rows", ["N*M", "2*N", "N*M*M", "N*3*M"])
def test_rows_of_several_symbols_are_one_size(rows: str) -> None:
    model = fused(FLAT.replace("R", f'"{rows}"'))
    kernel = the_kernel(model)
    assert len(kernel.symbols) == 1
    x, z = (np.linspace(-1, 1, 72, dtype=np.float32).reshape(12, 6) * sign for sign in (1, -1))
    (found,) = kernel_results(kernel, [x, z])
    np.testing.assert_allclose(found, np.exp(x) * z + x, rtol=1e-6)
    with_body = with_kernels(model, {"x": x, "z": z}, body=True)["y"]
    np.testing.assert_allclose(with_body, found, rtol=1e-6)
