"""Graph before, graph after."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from onnx_ir.passes.common import ShapeInferencePass

from ort_dynamo.graph.marks import FOR_KERNEL
from ort_dynamo.passes.onnx.compute_in_half import ComputeInHalf
from ort_dynamo.runtime.installed.providers import recorded_cpu_targets, recorded_cuda_targets
from ort_dynamo.testing import assert_rewrites

CUDA = recorded_cuda_targets()[-1]
MARKS = {name: {FOR_KERNEL: "1"} for name in ("wide_x", "wide_w", "y")}
HEADER = '<ir_version: 10, opset_import: ["" : 20]>\n'


def between_casts(middle: str, to: int = 16) -> str:
    type_ = {16: "bfloat16", 10: "float16"}[to]
    return (
        HEADER
        + f"""
g ({type_}[4] x, {type_}[4] w, bool[4] c) => ({type_}[4] z) {{
    wide_x = Cast <to: int = 1> (x)
    wide_w = Cast <to: int = 1> (w)
    {middle}
    y = Cast <to: int = {to}> (exact)
    z = Tanh (y)
}}
"""
    )


def in_half(middle: str, to: int = 16) -> str:
    return between_casts(middle, to).replace(f"    y = Cast <to: int = {to}> (exact)\n", "").replace("(y)", "(exact)")


@pytest.mark.parametrize("to", [16, 10])
def test_a_sum_of_two_half_width_values_is_taken_in_half_width(to: int) -> None:
    before, after = between_casts("exact = Add (wide_x, wide_w)", to), in_half("exact = Add (x, w)", to)
    assert_rewrites(ComputeInHalf(CUDA), before, after, MARKS)


NEIGHBOUR = "before = Exp (wide_w) rounded = Cast <to: int = {}> (before) again = Cast <to: int = 1> (rounded) "


@pytest.mark.parametrize(("to", "excess_precision", "kept"), [(16, True, False), (16, False, True), (10, True, True)])
def test_beside_an_operator_that_computes_wider_it_depends_on_the_roundings(
    to: int, excess_precision: bool, kept: bool
) -> None:
    middle = NEIGHBOUR.format(to)
    before = between_casts(middle + "exact = Add (wide_x, again)", to)
    after = in_half(middle + "exact = Add (x, rounded)", to) if kept else before
    marks = {**MARKS, "rounded": MARKS["y"], "again": MARKS["y"]}
    assert_rewrites(ComputeInHalf(CUDA, excess_precision), before, after, marks)


def test_a_choice_keeps_its_condition() -> None:
    before, after = between_casts("exact = Where (c, wide_x, wide_w)"), in_half("exact = Where (c, x, w)")
    assert_rewrites(ComputeInHalf(CUDA), before, after, MARKS)


@pytest.mark.parametrize(
    "middle",
    [
        "exact = Div (wide_x, wide_w)",  # how a kernel divides is its own affair
        "between = Mul (wide_x, wide_w) exact = Add (between, wide_w)",  # a formula rounds once, at its end
        "exact = Add (wide_x, wide_w) other = Neg (exact)",  # another node reads it unrounded
    ],
)
def test_anything_else_stays_in_float32(middle: str) -> None:
    assert_rewrites(ComputeInHalf(CUDA), between_casts(middle), between_casts(middle), MARKS)


def test_casts_of_the_program_stay() -> None:
    text = between_casts("exact = Add (wide_x, wide_w)")
    assert_rewrites(ComputeInHalf(CUDA), text, text, {"y": MARKS["y"]})
    assert_rewrites(ComputeInHalf(CUDA), text, text, {"wide_x": MARKS["y"], "wide_w": MARKS["y"]})


@pytest.mark.parametrize("target", recorded_cpu_targets(), ids=lambda target: target.version)
def test_without_a_kernel_it_stays(target: object) -> None:
    text = between_casts("exact = Sub (wide_x, wide_w)")
    assert_rewrites(ComputeInHalf(target), text, text, MARKS)  # type: ignore[arg-type]


@pytest.mark.parametrize(("number", "modified"), [(0.5, True), (0.1, False)])
def test_a_constant_goes_along_if_half_width_holds_it(number: float, modified: bool) -> None:
    model = ir.from_onnx_text(between_casts("exact = Mul (wide_x, wide_w)"))
    ShapeInferencePass()(model)
    product = next(node for node in model.graph if node.op_type == "Mul")
    tensor = ir.tensor(np.array(number, np.float32), name="half")
    value = ir.Value(name="half", shape=ir.Shape([]), type=ir.TensorType(tensor.dtype), const_value=tensor)
    model.graph.register_initializer(value)
    product.replace_input_with(1, value)
    for node in model.graph:
        if node.outputs[0].name in MARKS:
            node.metadata_props[FOR_KERNEL] = "1"
    result = ComputeInHalf(CUDA)(model)
    assert result.modified is modified
    dtypes = {value.dtype for value in product.inputs if value is not None}
    assert dtypes == ({ir.DataType.BFLOAT16} if modified else {ir.DataType.FLOAT})


def test_an_output_of_the_graph_keeps_its_name() -> None:
    text = between_casts("exact = Add (wide_x, wide_w)").replace("    z = Tanh (y)\n", "").replace("[4] z)", "[4] y)")
    model = ir.from_onnx_text(text)
    for node in model.graph:
        if node.outputs[0].name in MARKS:
            node.metadata_props[FOR_KERNEL] = "1"
    assert ComputeInHalf(CUDA)(model).modified
    assert [output.name for output in model.graph.outputs] == ["y"]
    assert [output.dtype for output in model.graph.outputs] == [ir.DataType.BFLOAT16]
