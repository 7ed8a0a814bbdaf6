"""Graph before, graph after."""

from __future__ import annotations

import logging

import numpy as np
import onnx_ir as ir
import pytest
import torch

from ort_dynamo.passes.onnx.fuse_row_sum import FuseRowSum
from ort_dynamo.runtime.installed.importing import onnxruntime
from ort_dynamo.testing import assert_rewrites

HEADER = '<ir_version: 10, opset_import: ["" : 20]>\n'

SUM_OF_ROWS = (
    HEADER
    + """
g (float[64, 3] x) => (float[1, 3] y) <int64[1] axes = {0}> {
    y = ReduceSum (x, axes)
}
"""
)


def test_a_sum_over_rows_becomes_a_matrix_product() -> None:
    ones = ", ".join(["1"] * 64)
    assert_rewrites(
        FuseRowSum(),
        SUM_OF_ROWS,
        HEADER
        + f"""
g (float[64, 3] x) => (float[1, 3] y)
<int64[1] axes = {{0}}, float[1, 64] ones_1x64 = {{{ones}}}> {{
    y = MatMul (ones_1x64, x)
}}
""",
    )


def test_leading_axes_without_keepdims_are_summed_together() -> None:
    ones = ", ".join(["1"] * 32)
    assert_rewrites(
        FuseRowSum(),
        HEADER
        + """
g (float[4, 8, 5] x) => (float[5] y) <int64[2] axes = {-2, 0}> {
    y = ReduceSum <keepdims: int = 0> (x, axes)
}
""",
        HEADER
        + f"""
g (float[4, 8, 5] x) => (float[5] y)
<int64[2] axes = {{-2, 0}}, int64[2] shape_32x5 = {{32, 5}}, float[32] ones_32 = {{{ones}}}> {{
    y_row_sum_flat = Reshape (x, shape_32x5)
    y = MatMul (ones_32, y_row_sum_flat)
}}
""",
    )


def test_several_dimensions_come_back_after_the_product() -> None:
    ones = ", ".join(["1"] * 32)
    assert_rewrites(
        FuseRowSum(),
        HEADER
        + """
g (float[4, 8, 5, 6] x) => (float[1, 1, 5, 6] y) <int64[2] axes = {0, 1}> {
    y = ReduceSum (x, axes)
}
""",
        HEADER
        + f"""
g (float[4, 8, 5, 6] x) => (float[1, 1, 5, 6] y)
<int64[2] axes = {{0, 1}}, int64[2] shape_32x30 = {{32, 30}}, float[1, 32] ones_1x32 = {{{ones}}},
 int64[4] shape_1x1x5x6 = {{1, 1, 5, 6}}> {{
    y_row_sum_flat = Reshape (x, shape_32x30)
    y_row_sum = MatMul (ones_1x32, y_row_sum_flat)
    y = Reshape (y_row_sum, shape_1x1x5x6)
}}
""",
    )


@pytest.mark.parametrize(
    "body",
    [
        "g (float[64, 3] x) => (float[64, 1] y) <int64[1] axes = {1}> { y = ReduceSum (x, axes) }",
        "g (float[64, 3] x) => (float[1, 1] y) <int64[2] axes = {0, 1}> { y = ReduceSum (x, axes) }",
        "g (float[8, 3] x) => (float[1, 3] y) <int64[1] axes = {0}> { y = ReduceSum (x, axes) }",
        "g (double[64, 3] x) => (double[1, 3] y) <int64[1] axes = {0}> { y = ReduceSum (x, axes) }",
        "g (float[n, 3] x) => (float[1, 3] y) <int64[1] axes = {0}> { y = ReduceSum (x, axes) }",
        "g (float[64, 3] x, int64[1] axes) => (float[a, b] y) { y = ReduceSum (x, axes) }",
        "g (float[64, 3] x) => (float[1, 3] y) <int64[1] axes = {0}> { y = ReduceMean (x, axes) }",
        "g (float[64, 3, 0] x) => (float[1, 3, 0] y) <int64[1] axes = {0}> { y = ReduceSum (x, axes) }",
    ],
    ids=["columns", "everything", "few rows", "double", "unknown rows", "unknown axes", "mean", "no elements"],
)
def test_the_nearest_other_sums_stay(body: str) -> None:
    assert_rewrites(FuseRowSum(), HEADER + body, HEADER + body)


def test_the_numbers_are_the_sum() -> None:
    model = ir.from_onnx_text(SUM_OF_ROWS)
    FuseRowSum()(model)
    session = onnxruntime().InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    x = np.random.default_rng(0).standard_normal((64, 3), np.float32)
    np.testing.assert_allclose(session.run(None, {"x": x})[0], x.sum(0, keepdims=True), rtol=1e-5, atol=1e-5)


def test_a_sum_over_a_tensor_without_elements_has_a_gradient() -> None:
    bias = torch.zeros(4, 0, requires_grad=True)
    compiled = torch.compile(lambda x: (x + bias).exp(), backend="ort_train", options={"fallback": "error"})
    compiled(torch.zeros(32, 4, 0)).sum().backward()
    assert bias.grad is not None
    assert bias.grad.shape == (4, 0)


def test_a_near_match_says_why_it_is_left(caplog: pytest.LogCaptureFixture) -> None:
    model = ir.from_onnx_text("""<ir_version: 10, opset_import: ["" : 20]>
        g (float[4, 3] x, float[64, 3] z) => (float[1, 3] few, float[64, 1] last)
        <int64[1] zero = {0}, int64[1] one = {1}> {
        few = ReduceSum(x, zero)
        last = ReduceSum(z, one)
    }""")
    with caplog.at_level(logging.DEBUG, logger="ort_dynamo.passes.onnx.analysis.refusals"):
        assert not FuseRowSum()(model).modified
    assert [record.getMessage() for record in caplog.records] == [
        "FuseRowSum leaves few (ReduceSum): 4 rows are fewer than 16",
        "FuseRowSum leaves last (ReduceSum): axes [1] of 2 are not the leading ones, or are all of them",
    ]
