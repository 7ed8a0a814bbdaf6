"""Graph before, graph after."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator

from ort_dynamo.passes.onnx.copy_numbers import CopyNumbers
from ort_dynamo.testing import assert_rewrites

HEADER = '<ir_version: 10, opset_import: ["" : 20]>\n'

MEAN = """g (float[n, 4] x, float t) => (float y) <int64[1] axis = {0}> {
  s = Shape<start = 0, end = 1>(x)
  n = Squeeze(s, axis)
  f = Cast<to = 1>(n)
  y = Div(t, f)
}"""


def test_a_number_that_arithmetic_reads_is_copied() -> None:
    assert_rewrites(
        CopyNumbers(),
        HEADER + MEAN,
        HEADER
        + """g (float[n, 4] x, float t) => (float y) <int64[1] axis = {0}, int64 one = {1}, int64[0] shape_ = {}> {
  s = Shape<start = 0, end = 1>(x)
  n = Squeeze(s, axis)
  n_Add = Add(n, one)
  n_Range = Range(n, n_Add, one)
  n_Reshape = Reshape(n_Range, shape_)
  f = Cast<to = 1>(n_Reshape)
  y = Div(t, f)
}""",
    )


def test_a_branch_reads_the_copy() -> None:
    """The provider leaves an If to the CPU if its condition is an input, and a branch reads a number on the host."""
    text = """g (bool c, float[n, 4] x) => (float[n, 4] y) <int64[1] axis = {0}> {
  s = Shape<start = 0, end = 1>(x)
  n = Squeeze(s, axis)
  y = If(c) <
    then_branch = t () => (float[n, 4] u) { f = Cast<to = 1>(n)  u = Mul(x, f) },
    else_branch = e () => (float[n, 4] v) { i = Add(n, n)  j = Cast<to = 1>(i)  v = Sub(x, j) }
  >
}"""
    model = ir.from_proto(onnx.parser.parse_model(HEADER + text))
    given = [{"x": np.full((3, 4), 2, np.float32), "c": np.array(c)} for c in (True, False)]
    expected = [ReferenceEvaluator(ir.to_proto(model)).run(None, one)[0] for one in given]
    assert CopyNumbers()(model).modified
    onnx.checker.check_model(changed := ir.to_proto(model), full_check=True)
    for one, right in zip(given, expected, strict=True):
        np.testing.assert_array_equal(ReferenceEvaluator(changed).run(None, one)[0], right)
    (number,) = (value for node in model.graph if node.op_type == "Squeeze" for value in node.outputs)
    assert {user.op_type for user, _ in number.uses()} == {"Add", "Range"}
    assert all(user.graph is model.graph for user, _ in number.uses())
    assert not CopyNumbers()(model).modified


UNCHANGED = {
    "a shape is read on the host": """g (float[n, 4] x) => (float[m, 2] y) <int64[1] two = {2}> {
  s = Shape<start = 0, end = 1>(x)  d = Mul(s, two)  t = Concat<axis = 0>(d, two)  y = Reshape(x, t) }""",
    "so is a filler": """g (float[n] x) => (float[m] y) <int64[1] axis = {0}, int64[2] p = {1, 1}> {
  s = Shape(x)  n = Squeeze(s, axis)  f = Cast<to = 1>(n)  y = Pad(x, p, f) }""",
    "and the number of a range": """g (float[n] x) => (float[m] y) <int64[1] axis = {0}, float a = {0}, float b = {1}> {
  s = Shape(x)  n = Squeeze(s, axis)  f = Cast<to = 1>(n)  y = Range(a, f, b) }""",
    "no size is read": "g (float[n] x, int64 k) => (float[n] y) { f = Cast<to = 1>(k)  y = Mul(x, f) }",
    "several numbers are no number": """g (float[n, m] x, int64[2] k) => (int64[2] y) {
  s = Shape(x)  y = Mul(s, k) }""",
}


@pytest.mark.parametrize("reason", UNCHANGED)
def test_other_graphs_stay(reason: str) -> None:
    text = HEADER + UNCHANGED[reason]
    assert_rewrites(CopyNumbers(), text, text)


@pytest.mark.parametrize("rank", [0, 1, 3])
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_the_copy_is_the_number(rank: int, rows: int) -> None:
    """Equal numbers share one copy, of any rank and for no rows, too."""
    ones = ", ".join("1" * rank)
    text = (
        "g (float[n, 4] x, int64[k] a) => (int64[k] y, int64[k] z)"
        f" <int64[{rank}] shape = {{{ones}}}, int64[1] all = {{-1}}> {{"
        " s = Shape<start = 0, end = 1>(x)  n = Reshape(s, shape)"
        " u = Mul(a, n)  y = Reshape(u, all)  v = Add(n, a)  z = Reshape(v, all) }"
    )
    model = ir.from_proto(onnx.parser.parse_model(HEADER + text))
    given = {"x": np.zeros((rows, 4), np.float32), "a": np.array([3, -2])}
    expected = ReferenceEvaluator(ir.to_proto(model)).run(None, given)
    assert CopyNumbers()(model).modified
    assert [node.op_type for node in model.graph].count("Range") == 1
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    for found, right in zip(ReferenceEvaluator(ir.to_proto(model)).run(None, given), expected, strict=True):
        np.testing.assert_array_equal(found, right)
