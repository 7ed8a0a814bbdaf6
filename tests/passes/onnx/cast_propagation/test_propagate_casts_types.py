"""Graph before, graph after, for operators that take some types only or compute in float32 internally."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import pytest
from cast_graphs import FLOOD, FORWARD, HEADER, INSERT, check, spelled

from ort_dynamo import PropagateCastOpsStrategy
from ort_dynamo.passes.onnx import PropagateCasts
from ort_dynamo.runtime.installed.providers import recorded_cpu_targets
from ort_dynamo.testing import assert_rewrites

# Softmax and normalisations.


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("name", ["Softmax", "Tanh"])
def test_operators_that_compute_in_float32_internally_become_narrow_between_casts(name: str, level: int) -> None:
    check(
        f"g (float16[2, 3] x) => (float16[2, 3] y) {{ a = => f32(x) b = {name} (a) c = => f16(b) y = Exp (c) }}",
        f"g (float16[2, 3] x) => (float16[2, 3] y) {{ b = {name} (x) y = Exp (b) }}",
        level=level,
    )


@pytest.mark.parametrize("strategy", [INSERT, FLOOD])
@pytest.mark.parametrize("name", ["Softmax", "Tanh"])
def test_it_stays_with_a_cast_on_one_side(name: str, strategy: PropagateCastOpsStrategy) -> None:
    for text in (
        f"g (float16[2, 3] x) => (float[2, 3] y) {{ a = => f32(x) b = {name} (a) y = Exp (b) }}",
        f"g (float[2, 3] x) => (float16[2, 3] y) {{ b = {name} (x) c = => f16(b) y = Exp (c) }}",
    ):
        check(text, strategy=strategy)


def test_a_cast_moves_over_a_tanh_at_level_2_or_if_it_is_in_the_list() -> None:
    before = FORWARD.format("", "a = => f32(x) b = Tanh (a) c = Transpose (b) y = Exp (c)")
    after = FORWARD.format("", "b = Tanh (x) c = Transpose (b) c_float32 = => f32(c) y = Exp (c_float32)")
    check(before, after, level=2)
    check(before, after, level=1, allow=["Tanh"])


def test_nothing_is_known_beyond_a_softmax_that_stays() -> None:
    check("g (float16[2, 3] x) => (float[2, 3] y) { a = => f32(x) b = Softmax (a) c = Neg (b) y = Exp (c) }")
    check("g (float[2, 3] x) => (float16[2, 3] y) { a = Neg (x) b = Softmax (a) c = => f16(b) y = Exp (c) }")


NORM = "g (float16[2, 4] x, float[4] s) => (float16[2, 4] y) {{ {} y = Exp ({}) }}"


@pytest.mark.parametrize("parameters", [{"level": 2}, {"level": 0, "allow_layer_norm_mod_precision": True}])
def test_a_layer_normalization_changes_precision_only_if_allowed(parameters: dict[str, Any]) -> None:
    before = NORM.format("a = => f32(x) b = LayerNormalization (a, s) c = => f16(b)", "c")
    check(before, level=1)
    after = NORM.format("s_float16 = => f16(s) b = LayerNormalization (x, s_float16)", "b")
    check(before, after, strategy=INSERT, **parameters)


@pytest.mark.parametrize("domain", ["", "ai.onnx"])
def test_the_statistics_of_a_layer_normalization_stay_float32(domain: str) -> None:
    header = HEADER.replace('""', f'"{domain}"')
    text = """g (float16[2, 4] x, float16[4] s) => (float16[2, 4] y, float[2, 1] m) {
        %s c, m = LayerNormalization (a, b) %s }"""
    assert_rewrites(
        PropagateCasts(),
        header + spelled(text % ("a = => f32(x) b = => f32(s)", "y = => f16(c)")),
        header + (text % ("", "")).replace("c, m", "y, m").replace("(a, b)", "(x, s)"),
    )


# Two narrow types, symbols, kernels, contrib operators.


def test_each_narrow_type_has_its_turn() -> None:
    text = "g (float16[2] x, bfloat16[2] w) => (float[2] y, float[2] z) {{ {} }}"
    before = "a = => f32(x) b = Neg (a) y = Exp (b) c = => f32(w) d = Neg (c) z = Exp (d)"
    half = "b = Neg (x) b_float32 = => f32(b) y = Exp (b_float32)"
    brain = "d = Neg (w) d_float32 = => f32(d) z = Exp (d_float32)"
    check(text.format(before), text.format(half + brain))
    check(text.format(before), text.format(half + "c = => f32(w) d = Neg (c) z = Exp (d)"), dtype=ir.DataType.FLOAT16)


def test_symbolic_sizes_are_compared_symbol_by_symbol() -> None:
    text = "g (float16[%s] x, int64[k] i) => (float[%s] y) { %s }"
    body = "a = => f32(x) b = Neg (a) c = Gather (b, i) y = Exp (c)"
    # n and k have nothing to do with one another, so the cast does not move over the Gather, only over the Neg.
    check(
        text % ("n, 2", "k, 2", body),
        text % ("n, 2", "k, 2", "b = Neg (x) b_float32 = => f32(b) c = Gather (b_float32, i) y = Exp (c)"),
    )
    check(
        text % ("k, 2", "k, 2", body),
        text % ("k, 2", "k, 2", "b = Neg (x) c = Gather (b, i) c_float32 = => f32(c) y = Exp (c_float32)"),
    )


def test_two_unknown_sizes_are_different_sizes_and_stated_shapes_stay() -> None:
    text = (
        "g (float16[?, 2] x, int64[?] i) => (float[?, 2] y) { a = => f32(x) b = Neg (a) c = Gather (b, i) y = Exp (c) }"
    )
    model = ir.from_onnx_text(HEADER + spelled(text))  # assert_rewrites would name the unknown dimensions
    PropagateCasts()(model)
    assert [node.op_type for node in model.graph] == ["Neg", "Cast", "Gather", "Exp"]
    for value in (model.graph.inputs[0], model.graph.outputs[0]):
        assert value.shape == ir.Shape([None, 2])


@pytest.mark.parametrize("size", [1024, 1025])
def test_large_constants_are_cast_when_the_model_runs(size: int) -> None:
    numbers = ", ".join(["0.5"] * size)
    text = f"""g (float16[{size}] x) => (float16[{size}] y) <float[{size}] v = {{{numbers}}}> {{
        a = => f32(x) c = Add (a, v) d = => f16(c) y = Exp (d) }}"""
    model = ir.from_onnx_text(HEADER + spelled(text))
    PropagateCasts(level=2)(model)
    assert [node.op_type for node in model.graph] == ["Add", "Exp"] if size == 1024 else ["Cast", "Add", "Exp"]
    assert list(model.graph.initializers) == (["v_float16"] if size == 1024 else ["v"])


@pytest.mark.parametrize(
    "body",
    [
        # Its result has the type of its operand, without an attribute that says so and without being bound to it.
        "r = RandomNormalLike (a) y = Add (r, a)",
        # The result is a sequence of its input's type.
        "s = SplitToSequence (a) i = Constant <value = int64 {0}> () y = SequenceAt (s, i)",
    ],
    ids=["RandomNormalLike", "SplitToSequence"],
)
def test_an_operator_whose_result_would_change_type_unseen_stays(body: str) -> None:
    size = 1 if "Sequence" in body else 2
    check(
        f"g (float16[2] x) => (float[{size}] y) {{ a = => f32(x) {body} }}",
        allow=["RandomNormalLike", "SplitToSequence"],
    )


def test_a_kernel_must_take_the_narrow_type() -> None:
    cpu = recorded_cpu_targets()[0]
    check(FORWARD.format("", "a = => f32(x) b = Neg (a) y = Transpose (b)"), target=cpu)
    check(
        FORWARD.format("", "a = => f32(x) b = Transpose (a) y = Neg (b)"),
        FORWARD.format("", "b = Transpose (x) b_float32 = => f32(b) y = Neg (b_float32)"),
        target=cpu,
    )


def test_a_schema_must_take_the_narrow_type() -> None:
    old = '<ir_version: 7, opset_import: ["" : 12]>\n'
    body = "g (bfloat16[2] x) => (float[2] y) { a = Cast <to = 1> (x) b = Neg (a) y = Exp (b) }"
    model = ir.from_onnx_text(old + body)
    assert not PropagateCasts()(model).modified


@pytest.mark.parametrize("name", ["Gelu", "FastGelu"])
def test_contrib_operators_are_level_2(name: str) -> None:
    text = f"""g (float16[2] x) => (float16[2] y) {{
        a = => f32(x) b = com.microsoft.{name} (a) c = => f16(b) y = Exp (c) }}"""
    for level, expected in ((1, ["Cast", name, "Cast", "Exp"]), (2, [name, "Exp"])):
        model = ir.from_onnx_text(HEADER + spelled(text))  # not through assert_rewrites: ONNX cannot check such nodes
        PropagateCasts(level=level)(model)
        assert [node.op_type for node in model.graph] == expected


def test_a_contrib_operator_may_lack_an_input() -> None:
    text = """g (float16[2, 4] x, float16[4] s) => (float16[2, 4] y) {
        a = => f32(x) b = => f32(s) c = com.microsoft.SkipLayerNormalization (a, a, b, , b) y = => f16(c) }"""
    model = ir.from_onnx_text(HEADER + spelled(text))
    for node in model.graph:
        if node.op_type == "SkipLayerNormalization":
            node.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    PropagateCasts(allow_layer_norm_mod_precision=True)(model)
    (node,) = model.graph
    assert [None if value is None else value.dtype for value in node.inputs] == [
        *[ir.DataType.FLOAT16] * 3,
        None,
        ir.DataType.FLOAT16,
    ]


def test_skip_layer_normalization_keeps_its_statistics() -> None:
    text = """g (float16[2, 4] x, float16[4] s) => (float16[2, 4] y, float[2, 1] m) {
        a = => f32(x) b = => f32(s) c, m = com.microsoft.SkipLayerNormalization (a, a, b) y = => f16(c) }"""
    model = ir.from_onnx_text(HEADER + spelled(text))
    for node in model.graph:  # ONNX knows no types for it; a model with such nodes states them
        if node.op_type == "SkipLayerNormalization":
            node.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    PropagateCasts(allow_layer_norm_mod_precision=True)(model)
    (node,) = model.graph
    assert [value.dtype for value in node.outputs] == [ir.DataType.FLOAT16, ir.DataType.FLOAT]
