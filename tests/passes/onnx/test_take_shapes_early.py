"""Graph before, graph after."""

from __future__ import annotations

import onnx_ir as ir
import onnxruntime
import pytest

from ort_dynamo.passes.onnx.take_shapes_early import TakeShapesEarly
from ort_dynamo.runtime.installed.capabilities import omitted_optimizers
from ort_dynamo.runtime.installed.providers import find_target
from ort_dynamo.testing import assert_rewrites

HEADER = '<ir_version: 10, opset_import: ["" : 20]>\n'


def test_a_shape_is_taken_before_casts() -> None:
    assert_rewrites(
        TakeShapesEarly(),
        HEADER
        + """g (float[n] x) => (int64[1] s, double[n] b) {
            a = Cast<to = 7>(x)
            b = Cast<to = 11>(a)
            s = Shape(b)
        }""",
        HEADER
        + """g (float[n] x) => (int64[1] s, double[n] b) {
            a = Cast<to = 7>(x)
            b = Cast<to = 11>(a)
            s = Shape(x)
        }""",
    )


def test_a_shape_of_a_transpose_stays() -> None:
    text = HEADER + "g (float[n, m] x) => (int64[2] s) { a = Transpose<perm = [1, 0]>(x) s = Shape(a) }"
    assert_rewrites(TakeShapesEarly(), text, text)


NOT_READ_BY_A_CAST_FOR_ITS_SHAPE = """g (int64[n] t, int64[n] other) => (int64[n] w, int64[1] s) {
    e = Equal(t, other)
    k = Not(e)
    w = Where(k, t, other)
    c = Cast<to = 1>(k)
    s = Shape(c)
}"""

DIVIDES_ONE = """g (float[n] x, float[n] y) => (float[n] z) {
    r = Relu(y)
    m = Cast<to = 1>(r)
    one = Constant<value_float = 1.0>()
    d = Div(one, x)
    z = Mul(d, m)
}"""


@pytest.mark.parametrize("graph", [NOT_READ_BY_A_CAST_FOR_ITS_SHAPE, DIVIDES_ONE])
def test_sessions_open_without_the_optimizers_that_lose_edges(graph: str) -> None:
    model = ir.to_proto(ir.from_onnx_text(HEADER + graph)).SerializeToString()
    omitted = omitted_optimizers((), find_target("cpu"))
    onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"], disabled_optimizers=omitted)
