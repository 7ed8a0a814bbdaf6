"""Graph before, graph after, for every rule, strategy and level; beside each match its nearest non-match."""

from __future__ import annotations

import logging
from typing import Any

import onnx_ir as ir
import pytest

from ort_dynamo import PropagateCastOpsStrategy
from ort_dynamo.errors import InvalidOptionError
from ort_dynamo.graph.marks import PASS
from ort_dynamo.passes.onnx import CastSummary, PropagateCasts
from ort_dynamo.runtime.installed.providers import recorded_cpu_targets
from ort_dynamo.testing import assert_rewrites

HEADER = '<ir_version: 10, opset_import: ["" : 20, "com.microsoft" : 1]>\n'
NONE, INSERT, FLOOD = PropagateCastOpsStrategy


def spelled(text: str) -> str:
    """Casts are short in the texts below: `=> f16(x)` and `=> f32(x)`."""
    return text.replace("=> f16", "Cast <to = 10> ").replace("=> f32", "Cast <to = 1> ")


def check(before: str, after: str | None = None, **parameters: Any) -> None:
    """The pass turns one graph into the other; without `after`, it leaves it alone."""
    assert_rewrites(PropagateCasts(**parameters), HEADER + spelled(before), HEADER + spelled(after or before))


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


def test_a_cast_to_another_wide_type_stays() -> None:
    check(
        "g (float[2] x) => (double[2] y, float16[2] z) { y = Cast <to = 11> (x) z = => f16(x) }",
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


# 6. Forward from a widening.

FORWARD = "g (float16[2, 3] x) => (float[3, 2] y{}) {{ {} }}"


@pytest.mark.parametrize("strategy", [INSERT, FLOOD])
@pytest.mark.parametrize("name", ["Neg", "Relu", "Abs", "Identity"])
def test_a_widening_moves_down_over_exact_operators(name: str, strategy: PropagateCastOpsStrategy) -> None:
    check(
        FORWARD.format("", f"a = => f32(x) b = Transpose (a) c = {name} (b) y = Exp (c)"),
        FORWARD.format("", f"b = Transpose (x) c = {name} (b) c_float32 = => f32(c) y = Exp (c_float32)"),
        strategy=strategy,
    )


@pytest.mark.parametrize("name", ["Exp", "Sqrt", "Sigmoid", "LogSoftmax"])
def test_a_widening_does_not_move_over_others(name: str) -> None:
    check(FORWARD.format("", f"a = => f32(x) c = {name} (a) y = Transpose (c)"), level=2)


def test_a_widening_moves_to_a_graph_output_whose_name_and_type_stay() -> None:
    check(
        FORWARD.format("", "a = => f32(x) y = Transpose (a)"),
        FORWARD.format("", "y_float16 = Transpose (x) y = => f32(y_float16)"),
    )


def test_readers_of_a_widening_share_the_new_one() -> None:
    check(
        FORWARD.format(", float[3, 2] z", "a = => f32(x) b = Transpose (a) y = Exp (b) z = Sqrt (b)"),
        FORWARD.format(
            ", float[3, 2] z", "b = Transpose (x) b_float32 = => f32(b) y = Exp (b_float32) z = Sqrt (b_float32)"
        ),
    )


def test_a_widening_that_would_become_two_stays() -> None:
    check(
        FORWARD.format(", float[3, 2] z", "a = => f32(x) b = Transpose (a) y = Exp (b) c = Transpose (a) z = Exp (c)"),
    )


def test_a_widening_does_not_move_to_where_the_value_is_larger() -> None:
    check(
        "g (float16[1, 3] x) => (float[9, 3] y) <int64[2] s = {9, 3}> { a = => f32(x) b = Expand (a, s) y = Exp (b) }"
    )


def test_a_widening_moves_to_where_the_value_is_smaller() -> None:
    check(
        """g (float16[9, 3] x) => (float[1, 3] y) <int64[1] i = {4}> {
            a = => f32(x) b = Gather (a, i) y = Exp (b) }""",
        """g (float16[9, 3] x) => (float[1, 3] y) <int64[1] i = {4}> {
            b = Gather (x, i) b_float32 = => f32(b) y = Exp (b_float32) }""",
    )


def test_all_other_readers_of_a_value_inside_a_region_get_it_widened() -> None:
    # Where ONNX Runtime's own pass stops at the first reader with another float32 operand and forgets the next (Q1).
    check(
        """g (float16[6] x, float[6] v) => (float[6] y, float[6] z, float[6] w) {
            a = => f32(x) n = Neg (a) r = Relu (n) y = Add (r, v) z = Exp (r) w = Max (r, v) }""",
        """g (float16[6] x, float[6] v) => (float[6] y, float[6] z, float[6] w) {
            n = Neg (x) r = Relu (n) r_float32 = => f32(r)
            y = Add (r_float32, v) z = Exp (r_float32) w = Max (r_float32, v) }""",
        allow=("Add", "Max"),
    )


def test_of_equally_many_bytes_fewer_casts_are_cheaper() -> None:
    check(
        """g (float16[6] x) => (float[3] y, float[3] z) {
            a = => f32(x) n = Neg (a) b, c = Split <num_outputs = 2> (n) y = Exp (b) z = Exp (c) }""",
        """g (float16[6] x) => (float[3] y, float[3] z) {
            n = Neg (x) n_float32 = => f32(n) b, c = Split <num_outputs = 2> (n_float32) y = Exp (b) z = Exp (c) }""",
    )


# 7. Backward from a rounding.

BACKWARD = "g (float[2, 3] x) => (float16[3, 2] y{}) {{ e = Exp (x) {} }}"


@pytest.mark.parametrize("strategy", [INSERT, FLOOD])
def test_a_rounding_moves_up_over_exact_operators(strategy: PropagateCastOpsStrategy) -> None:
    check(
        BACKWARD.format("", "b = Transpose (e) c = Relu (b) d = => f16(c) y = Exp (d)"),
        BACKWARD.format("", "e_float16 = => f16(e) b = Transpose (e_float16) c = Relu (b) y = Exp (c)"),
        strategy=strategy,
    )


def test_a_rounding_moves_up_from_a_graph_output() -> None:
    check(
        BACKWARD.format("", "b = Transpose (e) y = => f16(b)"),
        BACKWARD.format("", "e_float16 = => f16(e) y = Transpose (e_float16)"),
    )


def test_a_rounding_moves_up_to_an_input() -> None:
    check(
        "g (float[2] x) => (float16[2] y) { a = Neg (x) b = => f16(a) y = Exp (b) }",
        "g (float[2] x) => (float16[2] y) { x_float16 = => f16(x) a = Neg (x_float16) y = Exp (a) }",
    )


def test_a_rounding_below_a_value_that_is_also_read_in_float32_stays() -> None:
    for body in (
        "b = Transpose (e) d = => f16(b) y = Exp (d) z = Exp (b)",
        "z = Transpose (e) d = => f16(z) y = Exp (d)",
    ):
        check(BACKWARD.format(", float[3, 2] z", body))
        # At level 2 as well: there would be a widening beside the rounding, also of a graph output (Q2).
        check(BACKWARD.format(", float[3, 2] z", body), level=2)


def test_a_rounding_does_not_move_to_where_the_value_is_larger() -> None:
    check(
        """g (float[9, 3] x) => (float16[1, 3] y) <int64[1] i = {4}> {
            e = Exp (x) b = Gather (e, i) d = => f16(b) y = Exp (d) }"""
    )


def test_roundings_on_several_branches_meet_above_them() -> None:
    check(
        BACKWARD.format(
            ", float16[6] z", "b = Transpose (e) c = => f16(b) y = Exp (c) d = Reshape (e, s) f = => f16(d) z = Exp (f)"
        ).replace(" {", " <int64[1] s = {6}> {", 1),
        BACKWARD.format(
            ", float16[6] z",
            "e_float16 = => f16(e) b = Transpose (e_float16) y = Exp (b) d = Reshape (e_float16, s) z = Exp (d)",
        ).replace(" {", " <int64[1] s = {6}> {", 1),
    )


# I. INSERT_AND_REDUCE.

BRANCHES = """g (float[6] x) => (float16[6] y, float16[6] z, float16[6] w, float[6] u) {{
    e = Exp (x) a = Neg (e) b = Relu (a) c = Abs (b) {} }}"""
THREE_ROUNDED = """k = => f16(a) l = => f16(b) m = => f16(c) y = Exp (k) z = Exp (l) w = Exp (m) u = Exp (c)"""


def test_insert_and_reduce_rounds_a_float32_value_once_where_that_saves_casts() -> None:
    check(
        BRANCHES.format(THREE_ROUNDED),
        """g (float[6] x) => (float16[6] y, float16[6] z, float16[6] w, float[6] u) {
            e = Exp (x) e_float16 = => f16(e) a = Neg (e_float16) b = Relu (a) c = Abs (b) c_float32 = => f32(c)
            y = Exp (a) z = Exp (b) w = Exp (c) u = Exp (c_float32) }""",
        strategy=INSERT,
    )


def test_flood_fill_does_not_round_it_below_level_2() -> None:
    check(BRANCHES.format(THREE_ROUNDED), strategy=FLOOD)
    rounded_and_returned = """g (float[6] x) => (float16[6] y, float16[6] z, float16[6] w, float[6] c) {
        e = Exp (x) a = Neg (e) b = Relu (a) c = Abs (b)
        k = => f16(a) l = => f16(b) m = => f16(c) y = Exp (k) z = Exp (l) w = Exp (m) }"""
    check(rounded_and_returned, strategy=FLOOD)


def test_insert_and_reduce_leaves_nodes_alone_that_no_cast_concerns() -> None:
    check(
        "g (float[6] x, float16[6] h) => (float[6] y, float[6] z) { a = Neg (x) y = Exp (a) z = => f32(h) }",
        strategy=INSERT,
    )


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


def test_the_statistics_of_a_layer_normalization_stay_float32() -> None:
    text = """g (float16[2, 4] x, float16[4] s) => (float16[2, 4] y, float[2, 1] m) {
        %s c, m = LayerNormalization (a, b) %s }"""
    check(
        text % ("a = => f32(x) b = => f32(s)", "y = => f16(c)"),
        (text % ("", "")).replace("c, m", "y, m").replace("(a, b)", "(x, s)"),
    )


# Sub-graphs.

BRANCH = """g (float16[2, 3] x, bool p) => (float[3, 2] y) {{ {}
    y = If (p) <then_branch = t () => (float[3, 2] yt) {{ {} }},
                else_branch = e () => (float[3, 2] ye) {{ {} }}> }}"""


def test_a_branch_reads_the_value_that_was_widened_outside() -> None:
    check(
        BRANCH.format(
            "a = => f32(x)",
            "b = => f16(a) c = Exp (b) d = Transpose (c) yt = => f32(d)",
            "f = Transpose (a) ye = Exp (f)",
        ),
        BRANCH.format(
            "",
            "c = Exp (x) d = Transpose (c) yt = => f32(d)",
            "f = Transpose (x) f_float32 = => f32(f) ye = Exp (f_float32)",
        ),
    )


def test_a_branch_that_only_takes_a_widening_back_returns_an_identity() -> None:
    text = """g (float16[2] x, bool p) => (float16[2] y) {{ {}
        y = If (p) <then_branch = t () => (float16[2] yt) {{ yt = {} }},
                    else_branch = e () => (float16[2] ye) {{ ye = Exp (x) }}> }}"""
    check(text.format("a = => f32(x)", "=> f16(a)"), text.format("", "Identity (x)"), strategy=NONE)
    check(
        text.format("h = Exp (x) a = => f32(h)", "=> f16(a)"), text.format("h = Exp (x)", "Identity (h)"), strategy=NONE
    )


def test_new_names_do_not_hide_names_in_branches() -> None:
    check(
        BRANCH.format(
            "a = => f32(x) b = Neg (a)", "b_float32 = Exp (b) yt = Transpose (b_float32)", "ye = Transpose (b)"
        ),
        BRANCH.format(
            "b = Neg (x) b_float32_2 = => f32(b)",
            "b_float32 = Exp (b_float32_2) yt = Transpose (b_float32)",
            "ye = Transpose (b_float32_2)",
        ),
    )


def test_a_rounding_inside_of_a_branch_does_not_serve_outside() -> None:
    text = """g (float16[2, 3] x, float[2, 3] v, bool p) => (float16[2, 3] z, float[2, 3] y) {{ {}
        y = If (p) <then_branch = t () => (float[2, 3] yt) {{ c = => f16(v) f = Exp (c) yt = => f32(f) }},
                    else_branch = e () => (float[2, 3] ye) {{ ye = Exp (v) }}> }}"""
    check(
        text.format("a = => f32(x) d = Add (a, v) e = => f16(d) z = Exp (e)"),
        text.format("v_float16 = => f16(v) d = Add (x, v_float16) z = Exp (d)"),
        level=2,
    )


def test_a_value_that_a_branch_reads_in_float32_is_widened_for_it() -> None:
    check(
        BRANCH.format("a = => f32(x) b = Neg (a)", "c = Exp (b) yt = Transpose (c)", "ye = Transpose (b)"),
        BRANCH.format(
            "b = Neg (x) b_float32 = => f32(b)",
            "c = Exp (b_float32) yt = Transpose (c)",
            "ye = Transpose (b_float32)",
        ),
    )


def test_the_body_of_a_loop_keeps_its_signature() -> None:
    text = """g (float16[2, 2] x, int64 n, bool p) => (float16[2, 2] y) {
        y = Loop (n, p, x) <body = b (int64 i, bool q, float16[2, 2] s) => (bool r, float16[2, 2] t) { %s }> }"""
    check(
        text % "r = Identity (q) a = => f32(s) c = Transpose (a) t = => f16(c)",
        text % "r = Identity (q) t = Transpose (s)",
    )


def test_the_body_of_a_scan_keeps_its_signature_and_reads_a_narrow_outer_value() -> None:
    before = """g (float16[2] x, float[2] s, float[3, 2] z) => (float[2] y, float16[3, 2] r) {
        a = => f32(x)
        y, r = Scan <num_scan_inputs = 1, body = b (float[2] t, float[2] i) => (float[2] u, float16[2] o) {
            u = Add (t, i) c = => f16(a) d = Neg (c) e = => f32(d) f = Abs (e) o = => f16(f) }> (s, z) }"""
    after = """g (float16[2] x, float[2] s, float[3, 2] z) => (float[2] y, float16[3, 2] r) {
        y, r = Scan <num_scan_inputs = 1, body = b (float[2] t, float[2] i) => (float[2] u, float16[2] o) {
            u = Add (t, i) d = Neg (x) o = Abs (d) }> (s, z) }"""
    check(before, after)


def test_a_rounding_in_a_branch_goes_where_its_value_becomes_narrow_outside() -> None:
    check(
        BRANCH.format(
            "b = Exp (x) a = => f32(b) d = Neg (a)",
            "c = => f16(d) f = Exp (c) h = => f32(f) yt = Transpose (h)",
            "i = => f16(d) j = Sqrt (i) k = => f32(j) ye = Transpose (k)",
        ),
        BRANCH.format(
            "b = Exp (x) d = Neg (b)",
            "f = Exp (d) yt_float16 = Transpose (f) yt = => f32(yt_float16)",
            "j = Sqrt (d) ye_float16 = Transpose (j) ye = => f32(ye_float16)",
        ),
    )


def test_casts_in_branches_count() -> None:
    # Level 2: a rounding of v and a widening of d would replace the widening of x and a rounding in each branch.
    text = """g (float16[2, 3] x, float[2, 3] v, bool p) => (float[2, 3] y, float[2, 3] z) {{ {}
        y = If (p) <then_branch = t () => (float[2, 3] yt) {{ {} yt = => f32(f) }},
                    else_branch = e () => (float[2, 3] ye) {{ {} ye = => f32(j) }}> }}"""
    check(
        text.format(
            "a = => f32(x) d = Add (a, v) z = Exp (d)", "c = => f16(d) f = Exp (c)", "i = => f16(d) j = Sqrt (i)"
        ),
        text.format(
            "v_float16 = => f16(v) d = Add (x, v_float16) d_float32 = => f32(d) z = Exp (d_float32)",
            "f = Exp (d)",
            "j = Sqrt (d)",
        ),
        level=2,
    )


def test_casts_that_nothing_reads_go_and_move_nothing() -> None:
    check(
        "g (float[2] x) => (float[2] y) { a = Neg (x) b = => f16(a) c = => f32(b) d = => f16(a) y = Exp (a) }",
        "g (float[2] x) => (float[2] y) { a = Neg (x) y = Exp (a) }",
        strategy=INSERT,
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
    [{"level": 3}, {"level": True}, {"strategy": "flood"}, {"allow": "Add"}, {"dtype": ir.DataType.DOUBLE}],
)
def test_parameters_are_checked(parameters: dict[str, Any]) -> None:
    with pytest.raises(InvalidOptionError):
        PropagateCasts(**parameters)


def test_strategies_have_the_numbers_of_onnx_runtime_and_are_known_by_name() -> None:
    assert [(member.name, member.value) for member in PropagateCastOpsStrategy] == [
        ("NONE", 0),
        ("INSERT_AND_REDUCE", 1),
        ("FLOOD_FILL", 2),
    ]
    assert PropagateCasts(strategy="insert_and_reduce") == PropagateCasts(strategy=INSERT) == PropagateCasts(strategy=1)  # type: ignore[arg-type]
