"""Graph before, graph after."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from ort_dynamo.passes.onnx.separate_outputs import SeparateOutputs
from ort_dynamo.testing import assert_rewrites

HEADER = '<ir_version: 10, opset_import: ["" : 20]>\n'


def test_an_output_that_is_an_input_is_copied() -> None:
    assert_rewrites(
        SeparateOutputs(),
        HEADER + "g (float[2] x) => (float[2] x, float[2] y) { y = Relu (x) }",
        HEADER + "g (float[2] x) => (float[2] x_copy_0, float[2] y) { y = Relu (x) x_copy_0 = Identity (x) }",
    )


def test_two_outputs_of_one_value_are_copied_apart() -> None:
    model = ir.from_onnx_text(HEADER + "g (float[2] x) => (float[2] y) { y = Relu (x) }")
    model.graph.outputs.append(model.graph.outputs[0])  # as identity elimination leaves it; not valid as text
    assert SeparateOutputs()(model).modified
    assert [value.name for value in model.graph.outputs] == ["y", "y_copy_1"]
    assert not SeparateOutputs()(model).modified


@pytest.mark.parametrize(("kind", "since"), [("seq(float[2])", 14), ("optional(float[2])", 16)])
def test_values_that_no_identity_takes_stay(kind: str, since: int) -> None:
    header, ends = (
        '<ir_version: 8, opset_import: ["" : {}]>\n',
        f"g ({kind} x, float[2] a) => ({kind} {{}}, float[2] y) ",
    )
    unchanged = ends.format("x") + "{ y = Relu (a) }"
    copied = ends.format("x_copy_0") + "{ y = Relu (a) x_copy_0 = Identity (x) }"
    assert_rewrites(SeparateOutputs(), header.format(since) + unchanged, header.format(since) + copied)
    assert_rewrites(SeparateOutputs(), header.format(since - 1) + unchanged, header.format(since - 1) + unchanged)


def test_outputs_of_their_own_stay() -> None:
    text = HEADER + "g (float[2] x) => (float[2] y, float[2] z) { y = Relu (x) z = Neg (y) }"
    assert_rewrites(SeparateOutputs(), text, text)
