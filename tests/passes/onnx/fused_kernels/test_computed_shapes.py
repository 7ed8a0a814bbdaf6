"""Reshapes and expansions to shapes that are computed from the shapes of tensors, inside fused kernels."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from generated_graphs import as_numpy, as_torch
from test_fuse_kernels import HEADER, assert_same, fused, run, with_kernels
from triton_interpreter import interpret

from ort_dynamo.graph.fused_op import DOMAIN, POINTERS
from ort_dynamo.passes.onnx.fuse_kernels import fused_kernels, fused_ops
from ort_dynamo.passes.onnx.fused_kernels.computed_shapes import measuring
from ort_dynamo.passes.onnx.lower_opset import LowerOpset
from ort_dynamo.runtime.kernels.kernel_compiler import triton_version

SIZES = """<float[N, T, 8] f, int64[1] width = {8}> {
  n = Shape<start=0, end=1>(like)  t = Shape<start=1, end=2>(like)  shape = Concat<axis=0>(n, t, width)"""
BIAS = f"""g (float["N*T", 8] x, float[8] b, int64[N, T] like) => (float[N, T, 8] y, float[N, T, 8] z) {SIZES}
  a = Add(x, b)  f = Reshape<allowzero=1>(a, shape)  y = Tanh(f)  z = Mul(y, f)
}}"""
EXPANDED = f"""g (float[8] x, float[N, T, 8] w, float[N, T] like) => (float[N, T, 8] y) {SIZES}
  e = Exp(x)  f = Expand(e, shape)  y = Mul(f, w)
}}"""
BY_DATA = """g (float[M, 8] x, float[8] b, int64[3] shape) => (float[N, T, 8] y) {
  a = Add(x, b)  f = Reshape(a, shape)  y = Tanh(f)
}"""
OF_ITSELF = """g (float[N, 8] x, float[8] b) => (float[N, 8] y) <float[N, 8] f> {
  a = Add(x, b)  shape = Shape(a)  f = Reshape(a, shape)  y = Tanh(f)
}"""
LOOP = """Loop <body = step (int64 i, bool on, STATE s) => (bool still, STATE next) {
    still = Identity(on)  INSIDE }> (twice, true, START)"""
LOOPS = "int64 twice = {2}, bool true = {1}"
OF_UNKNOWN_RANK = f"""g (float[8] x, float[8] b, float[N, T, 8] h) => (float[N, T, 8] y) <float[N, T, 8] f, {LOOPS}> {{
  like = {LOOP.replace("STATE", "float").replace("INSIDE", "next = Identity(s)").replace("START", "h")}
  shape = Shape(like)  a = Add(x, b)  f = Expand(a, shape)  y = Tanh(f)
}}"""
OF_UNKNOWN_LENGTH = """g (float[8] x, float[8] b, float[N, T, 8] like) => (float[N, T, 8] y)
  <float[8] a, float[N, T, 8] f, int64[?] shape> {
  shape = Shape(like)  a = Add(x, b)  f = Expand(a, shape)  y = Tanh(f)
}"""
OF_A_LOOP = f"""g (float[8] x, float[8] b, float[N, T, 8] like, int64[3] zeros) => (float[N, T, 8] y)
  <float[N, T, 8] f, int64[3] shape, {LOOPS}> {{
  sizes = Shape(like)
  shape = {LOOP.replace("STATE", "int64[3]").replace("INSIDE", "next = Add(s, zeros)").replace("START", "sizes")}
  a = Add(x, b)  f = Expand(a, shape)  y = Tanh(f)
}}"""
TEXTS = {"bias": BIAS, "expanded": EXPANDED, "of itself": OF_ITSELF}


def inputs_of(text: str, n: int, t: int) -> dict[str, np.ndarray]:
    draws = np.random.default_rng(0)
    sizes = {"N*T": n * t, "N": n, "T": t}
    found: dict[str, np.ndarray] = {}
    for value in onnx.parser.parse_model(HEADER + text).graph.input:
        dims = value.type.tensor_type.shape.dim
        shape = [dim.dim_value or sizes[dim.dim_param] for dim in dims]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        found[value.name] = np.zeros(shape, dtype) if dtype == np.int64 else draws.standard_normal(shape).astype(dtype)
    return found


@pytest.mark.parametrize(("n", "t"), [(3, 5), (1, 1), (2, 700)])
@pytest.mark.parametrize("name", TEXTS)
def test_kernel_and_function_compute_the_same(name: str, n: int, t: int) -> None:
    text, model = TEXTS[name], fused(TEXTS[name])
    inputs = inputs_of(text, n, t)
    expected = run(onnx.parser.parse_model(HEADER + text), inputs)
    assert_same(with_kernels(model, inputs, body=False), expected, 1e-6)
    assert_same(with_kernels(model, inputs, body=True), expected, 1e-6)
    assert_same(run(ir.to_proto(model), inputs), expected, 1e-6)


@pytest.mark.parametrize("name", ["bias", "expanded"])
def test_the_fused_node_reads_the_tensor_and_no_shape(name: str) -> None:
    model = fused(TEXTS[name])
    (node,) = model.graph
    assert node.domain == DOMAIN
    assert "like" in [value.name for value in node.inputs]
    (kernel,) = fused_kernels(model).values()
    assert {axis for _, axis in kernel.symbols} <= {0, 1}


def test_a_shape_that_others_read_is_computed_for_them() -> None:
    text = BIAS.replace("float[N, T, 8] z)", "float[N, T, 8] z, int64[3] shape)")
    model = fused(text)
    assert [node.op_type for node in model.graph if node.domain != DOMAIN] == ["Shape", "Shape", "Concat"]
    inputs = inputs_of(text, 2, 3)
    assert_same(run(ir.to_proto(model), inputs), run(onnx.parser.parse_model(HEADER + text), inputs), 1e-6)


@pytest.mark.parametrize("text", [BY_DATA, OF_ITSELF])
def test_other_shapes_end_a_kernel(text: str) -> None:
    model = fused(text)
    assert "Reshape" in [node.op_type for node in model.graph]


@pytest.mark.parametrize("text", [OF_UNKNOWN_RANK, OF_A_LOOP], ids=["of unknown rank", "of a loop"])
def test_shapes_that_no_kernel_can_know_end_a_kernel(text: str) -> None:
    model = fused(text)
    assert {"Loop", "Expand"} <= {node.op_type for node in model.graph}
    inputs = inputs_of(text, 2, 3)
    assert_same(run(ir.to_proto(model), inputs), run(onnx.parser.parse_model(HEADER + text), inputs), 1e-6)


def test_the_length_of_a_shape_may_be_unknown() -> None:
    model = fused(OF_UNKNOWN_LENGTH)
    assert [node.domain for node in model.graph if node.op_type != "Add"] == [DOMAIN]
    inputs = inputs_of(OF_UNKNOWN_LENGTH, 2, 3)
    plain = onnx.parser.parse_model(HEADER + OF_UNKNOWN_LENGTH)
    assert_same(run(ir.to_proto(model), inputs), run(plain, inputs), 1e-6)


@pytest.mark.parametrize(("dtype", "taken"), [("uint8", True), ("uint16", False), ("uint64", False)])
def test_a_kernel_measures_tensors_that_it_can_take(dtype: str, taken: bool) -> None:
    model = fused(BIAS.replace("int64[N, T] like", f"{dtype}[N, T] like"))
    assert all(one in POINTERS for op in fused_ops(model) for one in op.inputs)
    assert ("Reshape" not in [node.op_type for node in model.graph]) == taken


def test_nodes_of_a_shape_come_after_those_that_they_read() -> None:
    model = ir.from_proto(onnx.parser.parse_model(HEADER + BIAS))
    reshape = next(node for node in model.graph if node.op_type == "Reshape")
    assert [node.op_type for node in measuring([reshape])] == ["Shape", "Shape", "Concat"]
    assert measuring([node for node in model.graph if node.op_type == "Add"]) == []


def test_an_older_opset_takes_the_function() -> None:
    model = fused(BIAS)
    LowerOpset(17)(model)
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    assert {node.domain for node in proto.graph.node} == {""}
    inputs = inputs_of(BIAS, 3, 5)
    assert_same(run(proto, inputs), run(onnx.parser.parse_model(HEADER + BIAS), inputs), 1e-6)


@pytest.mark.skipif(triton_version() is None, reason="Triton is not installed")
@pytest.mark.parametrize("name", ["bias", "expanded"])
def test_the_printed_source_computes_the_same(name: str) -> None:
    model = fused(TEXTS[name])
    inputs = inputs_of(TEXTS[name], 3, 5)
    (op,), (node,) = fused_ops(model), model.graph
    given = [as_torch(inputs[str(value.name)]) for value in node.inputs]
    found = [as_numpy(one) for one in interpret(op, given)]
    expected = run(onnx.parser.parse_model(HEADER + TEXTS[name]), inputs)
    names = [str(value.name) for value in node.outputs]
    assert_same(dict(zip(names, found, strict=True)), {name: expected[name] for name in names}, 1e-6)
