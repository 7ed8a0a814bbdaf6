"""Groups of nodes become kernels that compute the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from generated_graphs import GraphMaker, as_numpy, as_torch, inputs_of
from numpy_form import computed
from triton_interpreter import interpret

from ort_dynamo.graph.fused_op import DOMAIN, ITSELF
from ort_dynamo.passes.onnx.fuse_kernels import FuseKernels, fused_kernels
from ort_dynamo.passes.onnx.fused_kernels.kernel import Kernel
from ort_dynamo.passes.onnx.fused_kernels.triton_source import fused_op
from ort_dynamo.runtime.installed.importing import onnxruntime

HEADER = '<ir_version: 10, opset_import: ["" : 20, "com.microsoft" : 1]>\n'


def fused(text: str | onnx.ModelProto) -> ir.Model:
    """The model with fused kernels; it passes the full checker, and a second run changes nothing."""
    proto = onnx.parser.parse_model(HEADER + text) if isinstance(text, str) else text
    model = ir.from_proto(proto)
    FuseKernels()(model)
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    assert not FuseKernels()(model).modified
    return model


def run(model: onnx.ModelProto, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Run a model in ONNX Runtime on the CPU, without its optimizers."""
    options = onnxruntime().SessionOptions()
    options.graph_optimization_level = onnxruntime().GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime().InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feeds = {
        name: onnxruntime().OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), 16)
        if array.dtype.name == "bfloat16"
        else onnxruntime().OrtValue.ortvalue_from_numpy(array)
        for name, array in inputs.items()
    }
    names = [output.name for output in session.get_outputs()]
    return dict(
        zip(
            names,
            (
                value.numpy() if value.data_type() != "tensor(bfloat16)" else value
                for value in session.run_with_ort_values(names, feeds)
            ),
            strict=True,
        )
    )


def with_kernels(
    model: ir.Model, inputs: Mapping[str, np.ndarray], *, body: bool, whole: bool = False
) -> dict[str, np.ndarray]:
    """Run a model node by node: the fused ones by the NumPy form of their kernels, or by the nodes of their bodies.

    Gives its outputs, or all of its values if `whole`.
    """
    proto, kernels = ir.to_proto(model), fused_kernels(model)
    values = {one.name: onnx.numpy_helper.to_array(one) for one in proto.graph.initializer} | dict(inputs)
    for node in proto.graph.node:
        given = [values[name] for name in node.input if name]
        if node.domain == DOMAIN and not body:
            found = kernel_results(kernels[node.op_type], given)
        else:
            found = reference(proto, node, {name: values[name] for name in node.input if name})
        values |= {name: value for name, value in zip(node.output, found, strict=True) if name}
    return values if whole else {output.name: values[output.name] for output in proto.graph.output}


def kernel_results(kernel: Kernel, given: list[np.ndarray]) -> list[np.ndarray]:
    symbols = [given[i].item() if axis == ITSELF else given[i].shape[axis] for i, axis in kernel.symbols]
    flat = computed(kernel, given, symbols)
    shapes = [[size.value(symbols) for size in store.shape] for store in kernel.stores]
    return [one.reshape(shape) for one, shape in zip(flat, shapes, strict=True)]


def interpreted(
    model: ir.Model, inputs: Mapping[str, np.ndarray]
) -> Iterator[tuple[dict[str, np.ndarray], dict[str, np.ndarray]]]:
    """Yield the outputs of each fused node by Triton's interpreter and by its NumPy form, on its inputs in a model."""
    kernels, values = fused_kernels(model), with_kernels(model, inputs, body=False, whole=True)
    for node in ir.to_proto(model).graph.node:
        if node.domain == DOMAIN:
            given = [values[name] for name in node.input]
            op = fused_op(kernels[node.op_type], node.op_type)
            found = map(as_numpy, interpret(op, list(map(as_torch, given))))
            right = kernel_results(kernels[node.op_type], given)
            yield dict(zip(node.output, found, strict=True)), dict(zip(node.output, right, strict=True))


def reference(model: onnx.ModelProto, node: onnx.NodeProto, given: dict[str, np.ndarray]) -> list[np.ndarray]:
    """One node, by ONNX's reference."""
    from onnx.reference import ReferenceEvaluator

    graph = onnx.helper.make_graph(
        [node],
        "one",
        [
            onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
            for name, v in given.items()
        ],
        [onnx.ValueInfoProto(name=name) for name in node.output if name],
    )
    one = onnx.helper.make_model(
        graph, functions=list(model.functions), opset_imports=list(model.opset_import), ir_version=10
    )
    return list(ReferenceEvaluator(one).run(None, given))


def assert_same(actual: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray], error: float) -> None:
    """Compare with a relative error of the largest finite number."""
    for name, value in expected.items():
        found, right = actual[name].astype(np.float64), value.astype(np.float64)
        assert found.shape == right.shape, name
        finite = np.isfinite(right)
        np.testing.assert_array_equal(found[~finite], right[~finite], err_msg=name)
        scale = np.abs(right[finite]).max(initial=1)
        np.testing.assert_allclose(found[finite], right[finite], rtol=0, atol=error * scale, err_msg=name)


def assert_fused_alike(plain: onnx.ModelProto, model: ir.Model, inputs: Mapping[str, np.ndarray], error: float) -> None:
    """Compare the kernels of a fused model, and their bodies, with the nodes that they stand for."""
    expected = with_kernels(ir.from_proto(plain), inputs, body=True)
    assert_same(with_kernels(model, inputs, body=False), expected, error)
    assert_same(with_kernels(model, inputs, body=True), expected, error)


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("seed", range(60))
def test_a_generated_graph_computes_the_same(seed: int, symbolic: bool) -> None:
    plain = GraphMaker(seed, symbolic=symbolic).model()
    onnx.checker.check_model(plain, full_check=True)
    model = fused(plain)
    inputs = inputs_of(plain, seed, {"rows": 5})
    # Where a number lies between two of a half type, an error of 1e-7 is enough for the other one.
    error = 2e-2 if any(node.op_type == "Cast" for node in plain.graph.node) else 2e-5
    with np.errstate(all="ignore"):
        assert_fused_alike(plain, model, inputs, error)


def test_most_generated_nodes_are_fused() -> None:
    before = after = 0
    for seed in range(60):
        plain = GraphMaker(seed).model()
        before += len(plain.graph.node)
        after += len(ir.to_proto(fused(plain)).graph.node)
    assert after < 0.6 * before


JOINED = """g (bfloat16[8,64,16,32] q, bfloat16[8,64,16,32] k, bfloat16[8,64,16,32] v)
  => (bfloat16[512,1536] z, float[1536] s) <int64[1] zero = {0}, int64[2] flat = {512, 1536}> {
  a = Transpose<perm=[0,2,1,3]>(q)
  b = Transpose<perm=[0,2,1,3]>(k)
  c = Transpose<perm=[0,2,1,3]>(v)
  a1 = Unsqueeze(a, zero)
  b1 = Unsqueeze(b, zero)
  c1 = Unsqueeze(c, zero)
  stack = Concat<axis=0>(a1, b1, c1)
  moved = Transpose<perm=[1,3,0,2,4]>(stack)
  z = Reshape(moved, flat)
  wide = Cast<to=1>(z)
  s = ReduceSum<keepdims=0>(wide, zero)
}"""


def test_the_join_of_three_gradients_and_the_sum_of_their_columns_are_one_kernel() -> None:
    model = fused(JOINED)
    assert len([node for node in model.graph if node.domain == DOMAIN]) == 2  # and one that adds up the parts
    assert len(list(model.graph)) == 2
    plain = onnx.parser.parse_model(HEADER + JOINED)
    assert_fused_alike(plain, model, inputs_of(plain, 0, {}), 1e-5)


HALVES = """g (float[2,8,2,16] x) => (float[1,8,2,16] y)
  <int64[1] one = {1}, int64[1] two = {2}, int64[1] first = {0}, int64[1] third = {2}> {
  a = Slice(x, one, two, first)
  e = Exp(a)
  b = Slice(e, one, two, third)
  n = Neg(b)
  c = Concat<axis=2>(n, b)
  y = Add(c, e)
}"""
"""The second half of one axis, and then of another."""


def test_pieces_of_the_same_number_of_two_axes() -> None:
    model = fused(HALVES)
    assert [node.domain for node in model.graph] == [DOMAIN]
    plain = onnx.parser.parse_model(HEADER + HALVES)
    assert_fused_alike(plain, model, inputs_of(plain, 0), 1e-6)


ROTATED = """g (float[2,8,2,16] g, float[8,16] cosine, float[8,16] sine) => (float[2,8,2,16] y)
  <int64[1] zero = {0}, int64[1] half = {8}, int64[1] end = {16}, int64[1] last = {3}> {
  t = Transpose<perm=[0,2,1,3]>(g)
  direct = Mul(t, cosine)
  m = Mul(t, sine)
  first = Slice(m, zero, half, last)
  n = Neg(first)
  second = Slice(m, half, end, last)
  pieces = Concat<axis=3>(second, n)
  sum = Add(SUM)
  y = Transpose<perm=[0,2,1,3]>(sum)
}"""
"""The gradient of a rotary embedding: one term is there at once, the other one through pieces."""


@pytest.mark.parametrize("terms", ["direct, pieces", "pieces, direct"])
def test_a_sum_joins_its_terms_in_any_order(terms: str) -> None:
    text = ROTATED.replace("SUM", terms)
    model = fused(text)
    assert [node.domain for node in model.graph] == [DOMAIN]
    plain = onnx.parser.parse_model(HEADER + text)
    assert_fused_alike(plain, model, inputs_of(plain, 0), 1e-6)


def test_kernels_that_are_equal_have_bodies_of_their_own() -> None:
    # Both traverse memory in the same way, but one gets a tensor without the axis that it adds.
    text = """g (float[8,1,16] x, float[16,16] w, float[8,1,1,16] p, float[8,1,1,16] q, float[8,1,1,16] r)
      => (float[8,1,2,16] y, float[8,1,2,16] z) <int64[1] one = {1}> {
      m = MatMul(x, w)
      u = Unsqueeze(m, one)
      c = Concat<axis=1>(u, p)
      y = Transpose<perm=[0,2,1,3]>(c)
      d = Concat<axis=1>(q, r)
      z = Transpose<perm=[0,2,1,3]>(d)
    }"""
    model = fused(text)
    first, second = fused_kernels(model).values()
    assert first == second
    plain = onnx.parser.parse_model(HEADER + text)
    inputs = inputs_of(plain, 0)
    assert_same(with_kernels(model, inputs, body=True), with_kernels(ir.from_proto(plain), inputs, body=True), 1e-6)


@pytest.mark.parametrize(("opset", "axis"), [(12, 1), (13, 2)])
@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax"])
def test_a_softmax_of_several_axes_is_not_fused(op: str, opset: int, axis: int) -> None:
    # Before opset 13 it normalizes all axes from the given one on, which is 1 by default, and since then the last one.
    text = f"g (float[2,3,4] x) => (float[2,3,4] y) {{ a = {op}(x)  y = Neg(a) }}"
    plain = onnx.parser.parse_model(HEADER.replace('"" : 20', f'"" : {opset}') + text)
    model, inputs = ir.from_proto(plain), inputs_of(plain, 0)
    assert FuseKernels()(model).modified == (opset >= 13)
    found = with_kernels(model, inputs, body=False) if opset >= 13 else run(ir.to_proto(model), inputs)
    rows = torch.from_numpy(inputs["x"]).flatten(axis)
    right = -(rows.softmax(-1) if op == "Softmax" else rows.log_softmax(-1)).reshape(2, 3, 4)
    assert_same(found, {"y": right.numpy()}, 1e-6)


@pytest.mark.parametrize("kept", ["y", "y mean", "y inverse"])
def test_a_layer_norm_without_some_of_its_results(kept: str) -> None:
    outputs = [name if name in kept.split() else "" for name in ("y", "mean", "inverse")]
    read = [onnx.helper.make_node("Neg", [name], [f"{name}_read"]) for name in kept.split()]
    values = {name: onnx.helper.make_tensor_value_info(f"{name}_read", 1, [6, 1]) for name in ("mean", "inverse")}
    values["y"] = onnx.helper.make_tensor_value_info("y_read", 1, [6, 8])
    inputs = [onnx.helper.make_tensor_value_info(name, 1, shape) for name, shape in (("x", [6, 8]), ("w", [8]))]
    norm = onnx.helper.make_node("LayerNormalization", ["x", "w"], outputs)
    graph = onnx.helper.make_graph([norm, *read], "g", inputs, [values[name] for name in kept.split()])
    plain = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10)
    model, given = fused(plain), inputs_of(plain, 0)
    assert [node.domain for node in model.graph] == [DOMAIN]
    expected = run(plain, given)
    assert_same(with_kernels(model, given, body=False), expected, 1e-6)
    assert_same(run(ir.to_proto(model), given), expected, 1e-6)


LOSS = """g (bfloat16[6,WIDTH] x, int64[6] t) => (float[6] loss, float[6,1] m, float[6,1] ls) <int64[1] one = {1}> {
  w = Cast<to=1>(x)
  m = ReduceMax<keepdims=1>(w, one)
  shifted = Sub(w, m)
  e = Exp(shifted)
  s = ReduceSum<keepdims=1>(e, one)
  ls = Log(s)
  lp = Sub(shifted, ls)
  i = Unsqueeze(t, one)
  picked = GatherElements<axis=1>(lp, i)
  row = Squeeze(picked, one)
  loss = Neg(row)
}"""
GRADIENT = """g (bfloat16[6,WIDTH] x, int64[6,1] t, float[6,1] m, float[6,1] ls, float[6,1] u)
  => (bfloat16[6,WIDTH] d) {
  w = Cast<to=1>(x)
  shifted = Sub(w, m)
  lp = Sub(shifted, ls)
  e = Exp(lp)
  product = Mul(e, u)
  added = ScatterElements<axis=1, reduction="add">(product, t, u)
  d = Cast<to=16>(added)
}"""


def cross_entropy(text: str, width: int) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """A half of a cross entropy, and its inputs: targets from both ends."""
    plain = onnx.parser.parse_model(HEADER + text.replace("WIDTH", str(width)))
    inputs = inputs_of(plain, 0, {})
    inputs["t"] = np.array([0, 3, width - 1, -1, 7, -width], np.int64).reshape(inputs["t"].shape)
    return plain, inputs


@pytest.mark.parametrize("width", [50, 20000])
@pytest.mark.parametrize("text", [LOSS, GRADIENT], ids=["loss", "gradient"])
def test_each_half_of_a_cross_entropy_is_one_kernel(text: str, width: int) -> None:
    plain, inputs = cross_entropy(text, width)
    model = fused(plain)
    assert len([node for node in model.graph if node.op_type != "Unsqueeze"]) == 1
    assert_fused_alike(plain, model, inputs, 2e-5 if text is LOSS else 1e-2)
