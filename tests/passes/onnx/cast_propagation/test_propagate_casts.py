"""Graph before, graph after, for the rules on casts beside an operator; beside each match its nearest non-match."""

from __future__ import annotations

import logging
from typing import Any

import onnx_ir as ir
import pytest
from cast_graphs import FLOOD, HEADER, INSERT, NONE, check, spelled

from ort_dynamo import PropagateCastOpsStrategy
from ort_dynamo.errors import InvalidOptionError
from ort_dynamo.graph.marks import PASS
from ort_dynamo.passes.onnx import CastSummary, PropagateCasts
from ort_dynamo.testing import assert_rewrites

# 1. A cast to the type that its operand has.


def test_a_cast_to_its_own_type_goes() -> None:
    check(
        "g (float[2] x) => (float16[2] z) { a = Exp (x) b = => f32(a) c = Exp (b) z = => f16(c) }",
        "g (float[2] x) => (float16[2] z) { a = Exp (x) c = Exp (a) z = => f16(c) }",
        strategy=NONE,
    )


def test_a_graph_output_that_was_such_a_cast_keeps_its_name() -> None:
    check(
        "g (float[2] x) => (float[2] y, float16[2] z) { a = Exp (x) y = => f32(a) z = => f16(a) }",
        "g (float[2] x) => (float[2] y, float16[2] z) { y = Exp (x) z = => f16(y) }",
        strategy=NONE,
    )


def test_a_graph_output_that_was_a_cast_of_an_input_becomes_an_identity() -> None:
    check(
        "g (float[2] x) => (float[2] y, float16[2] z) { y = => f32(x) z = => f16(x) }",
        "g (float[2] x) => (float[2] y, float16[2] z) { y = Identity (x) z = => f16(x) }",
        strategy=NONE,
    )


def test_an_operator_of_another_domain_is_no_cast() -> None:
    check("g (float[2] x) => (float16[2] z) { a = Exp (x) b = com.microsoft.Cast (a) z = => f16(b) }", strategy=NONE)


def test_a_model_whose_casts_name_their_dtype_does_not_change() -> None:
    text = """<ir_version: 3, opset_import: ["" : 5]>
        g (float16[2] x) => (float16[2] y) { a = Cast <to = "FLOAT"> (x) y = Cast <to = "FLOAT16"> (a) }"""
    assert_rewrites(PropagateCasts(), text, text)


def test_a_cast_to_another_wide_type_stays() -> None:
    check(
        "g (float[2] x) => (double[2] y, float16[2] z) { y = Cast <to = 11> (x) z = => f16(x) }",
        strategy=NONE,
    )


def test_a_node_whose_first_result_is_not_read_stays() -> None:
    check(
        """g (float[4] x, int64[1] k) => (int64[N] i, float16[4] z) {
            v, i = TopK (x, k) a = Exp (x) b = => f32(a) z = => f16(b) }""",
        "g (float[4] x, int64[1] k) => (int64[N] i, float16[4] z) { v, i = TopK (x, k) a = Exp (x) z = => f16(a) }",
        strategy=NONE,
    )


# 2. Casts of one value to one type.


def test_sibling_casts_of_a_node_become_one() -> None:
    check(
        "g (float[2] x) => (float16[2] y) { a = Exp (x) b = => f16(a) c = => f16(a) y = Add (b, c) }",
        "g (float[2] x) => (float16[2] y) { a = Exp (x) b = => f16(a) y = Add (b, b) }",
        strategy=NONE,
    )


def test_sibling_casts_of_an_input_become_one_and_a_graph_output_keeps_its_name() -> None:
    check(
        "g (float16[2] x) => (float[2] y, float[2] z) { a = => f32(x) y = Exp (a) z = => f32(x) }",
        "g (float16[2] x) => (float[2] y, float[2] z) { z = => f32(x) y = Exp (z) }",
        strategy=NONE,
    )


def test_two_graph_outputs_keep_a_cast_each() -> None:
    check("g (float16[2] x) => (float[2] y, float[2] z) { y = => f32(x) z = => f32(x) }", strategy=NONE)


def test_casts_to_different_types_stay() -> None:
    check(
        """g (float[2] x) => (float16[2] y, bfloat16[2] z) {
            a = => f16(x) y = Exp (a) b = Cast <to = 16> (x) z = Exp (b) }""",
        strategy=NONE,
    )


# 3. Widened and rounded back.


def test_widening_and_rounding_back_cancel() -> None:
    check(
        "g (float16[2] x) => (float16[2] y) { a = Exp (x) b = => f32(a) c = => f16(b) y = Exp (c) }",
        "g (float16[2] x) => (float16[2] y) { a = Exp (x) y = Exp (a) }",
        strategy=NONE,
    )


def test_a_widening_that_is_read_elsewhere_stays() -> None:
    check(
        "g (float16[2] x) => (float16[2] y, float[2] z) { b = => f32(x) c = => f16(b) y = Exp (c) z = Exp (b) }",
        "g (float16[2] x) => (float16[2] y, float[2] z) { b = => f32(x) y = Exp (x) z = Exp (b) }",
        strategy=NONE,
    )


def test_a_graph_output_that_was_rounded_back_takes_the_place_of_the_value() -> None:
    check(
        "g (float16[2] x) => (float16[2] y) { a = Exp (x) b = => f32(a) y = => f16(b) }",
        "g (float16[2] x) => (float16[2] y) { y = Exp (x) }",
        strategy=NONE,
    )


def test_a_second_graph_output_becomes_an_identity() -> None:
    check(
        "g (float[2] x) => (float16[2] y, float16[2] z) { y = => f16(x) b = => f32(y) z = => f16(b) }",
        "g (float[2] x) => (float16[2] y, float16[2] z) { y = => f16(x) z = Identity (y) }",
        strategy=NONE,
    )


def test_rounding_and_widening_stay() -> None:
    check("g (float[2] x) => (float[2] y) { a = => f16(x) b = => f32(a) y = Exp (b) }", level=2)


def test_a_widening_from_one_narrow_type_and_a_rounding_to_another_stay() -> None:
    check("g (float16[2] x) => (bfloat16[2] y) { b = => f32(x) y = Cast <to = 16> (b) }", level=2)


# 4. Outputs to inputs.

SPLIT = "g (float[4, 2] x) => (float16[2, 2] y) {{ e = Exp (x) {} y = Add (c, d) }}"


@pytest.mark.parametrize("strategy", [INSERT, FLOOD])
def test_an_operator_whose_results_are_all_rounded_becomes_narrow(strategy: PropagateCastOpsStrategy) -> None:
    check(
        SPLIT.format("a, b = Split <num_outputs = 2> (e) c = => f16(a) d = => f16(b)"),
        SPLIT.format("e_float16 = => f16(e) a, b = Split <num_outputs = 2> (e_float16)").replace("(c, d)", "(a, b)"),
        strategy=strategy,
    )


PART_ROUNDED = """g (float[5, 2] x) => (float16[1, 2] y, float[3, 2] z) <int64[3] sizes = {1, 1, 3}> {
    e = Exp (x) a, b, f = Split <axis = 0> (e, sizes) c = => f16(a) d = => f16(b) y = Add (c, d) z = Exp (f) }"""


@pytest.mark.parametrize("level", [1, 2])
def test_an_operator_with_a_result_that_is_not_rounded_stays(level: int) -> None:
    check(PART_ROUNDED, level=level)


def test_two_roundings_cost_more_than_one_and_a_widening_at_level_2() -> None:
    check(
        """g (float[2] x, float[2] w) => (float16[2] y, float16[2] z, float[4] u) {
            a = => f16(x) b = => f16(w) y = Exp (a) z = Exp (b) c = Concat <axis = 0> (x, w) d = => f16(c)
            e = Exp (d) f = => f32(e) u = Exp (f) }""",
        """g (float[2] x, float[2] w) => (float16[2] y, float16[2] z, float[4] u) {
            b = => f16(w) a = => f16(x) y = Exp (a) z = Exp (b) c = Concat <axis = 0> (a, b)
            e = Exp (c) f = => f32(e) u = Exp (f) }""",
    )


# 5. Inputs to outputs.

SUM = "g (float16[2] x, float16[2] w, float[2] v) => (float[2] y) {{ {} y = Exp (c) }}"


def test_an_operator_that_reads_only_widened_values_becomes_narrow() -> None:
    check(
        SUM.format("a = => f32(x) b = => f32(w) c = Add (a, b)"),
        SUM.format("c = Add (x, w) c_float32 = => f32(c)").replace("Exp (c)", "Exp (c_float32)"),
        level=2,
    )


def test_an_operator_that_is_not_allowed_stays() -> None:
    check(SUM.format("a = => f32(x) b = => f32(w) c = Add (a, b)"), level=1)
    check(SUM.format("a = => f32(x) b = => f32(w) c = Mul (a, b)"), level=2)


def test_an_operator_in_the_list_is_allowed_at_level_0() -> None:
    check(
        SUM.format("a = => f32(x) b = => f32(w) c = Mul (a, b)"),
        SUM.format("c = Mul (x, w) c_float32 = => f32(c)").replace("Exp (c)", "Exp (c_float32)"),
        level=0,
        allow=("Mul",),
    )


def test_level_0_allows_nothing_else() -> None:
    check("g (float16[2] x) => (float[2] y) { a = => f32(x) b = Neg (a) y = Exp (b) }", level=0, allow=("Mul",))


def test_level_minus_1_does_nothing() -> None:
    check("g (float16[2] x) => (float16[2] y) { a = => f32(x) y = => f16(a) }", level=-1)


MIXED = "g (float16[2] x, float[2] v) => (float16[2] y) {{ {} y = Exp (d) }}"


def test_a_float32_operand_is_rounded_at_level_2_if_that_pays() -> None:
    check(
        MIXED.format("a = => f32(x) c = Add (a, v) d = => f16(c)"),
        MIXED.format("v_float16 = => f16(v) c = Add (x, v_float16)").replace("Exp (d)", "Exp (c)"),
        level=2,
    )


def test_a_float32_operand_is_not_rounded_for_a_float32_result() -> None:
    for strategy in (INSERT, FLOOD):
        text = (
            "g (float16[2] x, float[2] v, bool[2] m) => (float[2] y) { a = => f32(x) c = Where (m, a, v) y = Exp (c) }"
        )
        check(text, strategy=strategy)


def test_an_initializer_beside_a_narrow_operand_is_converted() -> None:
    check(
        "g (float16[2] x) => (float[2] y) <float v = {0.5}> { a = => f32(x) c = Add (a, v) y = Exp (c) }",
        """g (float16[2] x) => (float[2] y) <float16 v_float16 = {14336}> {
            c = Add (x, v_float16) c_float32 = => f32(c) y = Exp (c_float32) }""",
        level=2,
    )


def test_a_constant_that_the_narrow_type_does_not_hold_keeps_its_reader_wide() -> None:
    body = "a = => f32(x) c = Where (m, a, v) y = Exp (c)"
    check(f"g (float16[2] x, bool[2] m) => (float[2] y) <float v = {{0.1}}> {{ {body} }}")
    check(
        f"g (float16[2] x, bool[2] m) => (float[2] y) <float v = {{0.5}}> {{ {body} }}",
        """g (float16[2] x, bool[2] m) => (float[2] y) <float16 v_float16 = {14336}> {
            c = Where (m, x, v_float16) c_float32 = => f32(c) y = Exp (c_float32) }""",
    )


# The pass's summary.


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("strategy", [NONE, INSERT, FLOOD])
def test_float32_graphs_are_not_even_typed(strategy: PropagateCastOpsStrategy, level: int) -> None:
    text = "g (float[2] x, bool[2] m) => (float[2] y) { a = Neg (x) b = => f32(m) c = Add (a, b) y = => f32(c) }"
    model = ir.from_onnx_text(HEADER + spelled(text))
    assert PropagateCasts(strategy, level).propagate(model) == CastSummary()
    assert [value.type for node in list(model.graph)[:3] for value in node.outputs] == [None, None, None]
    assert len(model.graph) == 4


def test_a_run_is_summed_up_once(caplog: pytest.LogCaptureFixture) -> None:
    body = "g (float16[2] x, float[2] v) => (float16[2] y) { a = => f32(x) c = Add (a, v) d = => f16(c) y = Exp (d) }"
    model = ir.from_onnx_text(HEADER + spelled(body))
    with caplog.at_level(logging.INFO, "ort_dynamo.passes.onnx.cast_propagation.propagate_casts"):
        summary = PropagateCasts(level=2).propagate(model)
    assert summary == CastSummary(2, moved=1, removed=1, narrowed=1, bytes_saved=12, modified=True)
    assert summary.after == 1
    assert [record.getMessage() for record in caplog.records] == [f"cast propagation: {summary}"]


def test_new_nodes_carry_the_pass() -> None:
    model = ir.from_onnx_text(HEADER + "g (float16[2] x) => (float[2] y) { a = Cast <to = 1> (x) y = Neg (a) }")
    PropagateCasts()(model)
    made = {node.op_type: node.metadata_props.get(PASS) for node in model.graph}
    assert made == {"Neg": None, "Cast": repr(PropagateCasts())}


def test_new_names_do_not_hide_old_ones() -> None:
    check(
        """g (float16[2] x) => (float[2] y, float[2] b_float32) {
            a = => f32(x) b = Neg (a) y = Exp (b) b_float32 = Sqrt (y) }""",
        """g (float16[2] x) => (float[2] y, float[2] b_float32) {
            b = Neg (x) b_float32_2 = => f32(b) y = Exp (b_float32_2) b_float32 = Sqrt (y) }""",
    )


@pytest.mark.parametrize(
    "parameters",
    [
        *({"level": 3}, {"level": True}, {"strategy": "flood"}, {"allow": "Add"}, {"dtype": ir.DataType.DOUBLE}),
        {"allow_layer_norm_mod_precision": "no"},
    ],
)
def test_parameters_are_checked(parameters: dict[str, Any]) -> None:
    (name,) = parameters
    with pytest.raises(InvalidOptionError, match=f"'{name}' cannot be"):
        PropagateCasts(**parameters)


def test_strategies_have_the_numbers_of_onnx_runtime_and_are_known_by_name() -> None:
    assert [(member.name, member.value) for member in PropagateCastOpsStrategy] == [
        ("NONE", 0),
        ("INSERT_AND_REDUCE", 1),
        ("FLOOD_FILL", 2),
    ]
    assert PropagateCasts(strategy="insert_and_reduce") == PropagateCasts(strategy=INSERT) == PropagateCasts(strategy=1)  # type: ignore[arg-type]
