"""Passes on models that have values of the names that the passes would give, and on models of an old IR version."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from ort_dynamo.passes.onnx import (
    FuseCrossEntropyGradient,
    FuseRowSum,
    JoinPads,
    PropagateCasts,
    SeparateOutputs,
    TransposeOnce,
)
from ort_dynamo.passes.onnx.fuse_kernels import FuseKernels
from ort_dynamo.runtime.installed.importing import onnxruntime

CASES: Mapping[str, tuple[ir.passes.InPlacePass, str]] = {
    "FuseRowSum": (
        FuseRowSum(),
        """g (float[4, 8, 5, 6] x) => (float[1, 1, 5, 6] y) <int64[2] axes = {0, 1}> { y = ReduceSum (x, axes) }""",
    ),
    "JoinPads": (
        JoinPads(),
        """g (float[4, 2] a, float[4, 3] b, float[5] x) => (float[4, 5] y)
        <int64[4] left = {0, 0, 0, 3}, int64[4] right = {0, 2, 0, 0}> {
            p = Pad (a, left)
            q = Pad (b, right)
            s = Add (p, x)
            y = Add (s, q)
        }""",
    ),
    "TransposeOnce": (
        TransposeOnce(max_copy=256 * 300),
        """g (float[256, 8] a, float[256, 256] b, float[256, 2100] c) => (float[8, 256] y, float[2100, 256] z) {
            y = com.microsoft.FusedMatMul <transA = 1> (a, b)
            z = com.microsoft.FusedMatMul <transA = 1> (c, b)
        }""",
    ),
    "SeparateOutputs": (
        SeparateOutputs(),
        "g (float[2] x) => (float[2] x, float[2] w, float[2] y) <float[2] w = {1, 2}> { y = Neg (x) }",
    ),
    "FuseCrossEntropyGradient": (
        FuseCrossEntropyGradient(),
        """g (float[4, 3] y, int64[4, 1] i, float[4, 1] u) => (float[4, 3] d)
        <int64[1] flat = {-1}, int64[1] none = {0}, int64[2] empty = {0, 0}, int64[4] pads = {0, 0, 4, 3},
         int64[1] axes = {1}, float[4, 3] g, float[4, 3] d> {
            f = Reshape (y, flat)
            s = Slice (f, none, none, none)
            e = Reshape <allowzero = 1> (s, empty)
            p = Pad (e, pads)
            g = ScatterElements <axis = 1> (p, i, u)
            t = ReduceSum (g, axes)
            x = Exp (y)
            m = Mul (x, t)
            d = Sub (g, m)
        }""",
    ),
    "PropagateCasts": (
        PropagateCasts(level=2),
        """g (float16[2, 3] x) => (float[3, 2] y) <float[3] w = {1, 2, 3}> {
            a = Cast <to = 1> (x)
            b = Add (a, w)
            c = Transpose (b)
            y = Exp (c)
        }""",
    ),
    "FuseKernels": (
        FuseKernels(),
        """g (float[512, 32] x) => (float[1, 32] s, float[512, 32] y) <int64[1] axes = {0}> {
            a = Neg (x)
            y = Abs (a)
            s = ReduceSum (y, axes)
        }""",
    ),
}


HEADER = '<ir_version: 9, opset_import: ["" : 20, "com.microsoft" : 1]>\n'


def proto_of(text: str, header: str = HEADER) -> onnx.ModelProto:
    return onnx.parser.parse_model(header + text)


def names_in(model: onnx.ModelProto) -> set[str]:
    values = [*model.graph.input, *model.graph.initializer]
    return {value.name for value in values} | {name for node in model.graph.node for name in node.output}


def with_name(text: str, name: str, place: str) -> onnx.ModelProto:
    """Give a value of a model, which is an output as well, the name."""
    model = proto_of(text)
    graph, kind = model.graph, helper.make_tensor_value_info(name, TensorProto.FLOAT, [1])
    seven = helper.make_tensor(name, TensorProto.FLOAT, [1], [7.0])
    made = helper.make_node("Constant", [], [name], value=seven)
    copied = helper.make_node("Identity", [name], ["copied"])
    if place in ("initializer", "default of an input"):
        graph.initializer.append(seven)
    if place in ("input", "default of an input"):
        graph.input.append(kind)
    if place == "node":
        graph.node.insert(0, made)
    if place == "branch":
        inner = helper.make_node("Identity", [name], ["inner"])
        output = helper.make_tensor_value_info("inner", TensorProto.FLOAT, [1])
        branch = helper.make_graph([made, inner], "branch", [], [output])
        yes = helper.make_tensor("yes", TensorProto.BOOL, [], [True])
        graph.node.append(helper.make_node("Constant", [], ["yes"], value=yes))
        copied = helper.make_node("If", ["yes"], ["copied"], then_branch=branch, else_branch=branch)
    graph.node.append(copied)
    graph.output.append(helper.make_tensor_value_info("copied", TensorProto.FLOAT, [1]))
    return model


def results(model: onnx.ModelProto) -> list[npt.NDArray[np.generic]]:
    onnx.checker.check_model(model, full_check=True)
    session = onnxruntime().InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    generator = np.random.default_rng(0)
    types = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int64)": np.int64}
    feeds = {one.name: generator.uniform(0, 3, one.shape).astype(types[one.type]) for one in session.get_inputs()}
    return [one.copy() for one in session.run(None, feeds)]  # onnxruntime-training returns the memory of an input


def check(pass_: ir.passes.InPlacePass, proto: onnx.ModelProto) -> onnx.ModelProto:
    """The pass changes the model, which stays valid and gives the same numbers."""
    model = ir.from_proto(proto)
    assert pass_(model).modified
    changed = ir.to_proto(model)
    tolerance = 1e-2 if isinstance(pass_, PropagateCasts) else 1e-4
    for before, after in zip(results(proto), results(changed), strict=True):
        np.testing.assert_allclose(before, after, rtol=tolerance, atol=1e-4)
    return changed


@pytest.mark.parametrize("place", ["initializer", "input", "default of an input", "node", "branch"])
@pytest.mark.parametrize("case", CASES)
def test_names_of_the_model_are_not_taken(case: str, place: str) -> None:
    pass_, text = CASES[case]
    plain = proto_of(text)
    new = names_in(check(pass_, plain)) - names_in(plain)
    assert new
    for name in new:
        check(pass_, with_name(text, name, place))


def test_equal_constants_are_shared() -> None:
    text = """g (float[32, 4] x, float[32, 4] z) => (float[1, 4] y, float[1, 4] w)
        <int64[1] axes = {0}, float[1, 32] ones_1x32 = {%s}> { y = ReduceSum (x, axes) w = ReduceSum (z, axes) }"""
    same = check(FuseRowSum(), proto_of(text % ", ".join(["1"] * 32)))
    assert [one.name for one in same.graph.initializer] == ["axes", "ones_1x32"]
    others = check(FuseRowSum(), proto_of(text % ", ".join(["2"] * 32)))
    assert [one.name for one in others.graph.initializer] == ["axes", "ones_1x32", "ones_1x32_2"]


@pytest.mark.parametrize("case", ["FuseRowSum", "TransposeOnce", "PropagateCasts"])
def test_constants_are_nodes_where_initializers_have_to_be_inputs(case: str) -> None:
    pass_, text = CASES[case]
    text = text.replace(" <int64[2] axes = {0, 1}> {", " { axes = Constant <value = int64[2] {0, 1}> ()")
    text = text.replace(" <float[3] w = {1, 2, 3}> {", " { w = Constant <value = float[3] {1, 2, 3}> ()")
    changed = check(pass_, proto_of(text, '<ir_version: 3, opset_import: ["" : 13, "com.microsoft" : 1]>'))
    assert not changed.graph.initializer
    assert changed.graph.node[0].op_type == "Constant"
