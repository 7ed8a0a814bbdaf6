"""Graph before, graph after."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from ort_dynamo.passes.onnx.transpose_once import TransposeOnce
from ort_dynamo.runtime.installed.importing import onnxruntime
from ort_dynamo.testing import assert_rewrites

HEADER = '<ir_version: 10, opset_import: ["" : 20, "com.microsoft" : 1]>\n'

SMALL = TransposeOnce(min_size=4, max_copy=64, min_ratio=2)
"""The pass with limits that small texts reach."""


def test_an_operand_is_transposed_before_the_product() -> None:
    assert_rewrites(
        SMALL,
        HEADER
        + """
g (float[8, 5] x, float[8, 4] dy) => (float[5, 4] y) {
    y = com.microsoft.FusedMatMul <transA: int = 1> (x, dy)
}
""",
        HEADER
        + """
g (float[8, 5] x, float[8, 4] dy) => (float[5, 4] y) <int64[2] shape_5x8 = {5, 8}> {
    y_copy = Transpose <perm: ints = [1, 0]> (x)
    y_operand = Reshape (y_copy, shape_5x8)
    y = MatMul (y_operand, dy)
}
""",
    )


def test_new_values_have_a_type_also_where_the_product_has_none() -> None:
    body = "g (float[8, 5] x, float[8, 4] dy) => (y) { y = com.microsoft.FusedMatMul <transA: int = 1> (x, dy) }"
    model = ir.from_onnx_text(HEADER + body)
    assert SMALL(model).modified
    assert all(value.type is not None for node in list(model.graph)[:-1] for value in node.outputs)


def test_a_factor_stays_with_the_product() -> None:
    assert_rewrites(
        SMALL,
        HEADER
        + """
g (float[8, 5] x, float[8, 4] dy) => (float[5, 4] y) {
    y = com.microsoft.FusedMatMul <alpha: float = 0.5, transA: int = 1> (x, dy)
}
""",
        HEADER
        + """
g (float[8, 5] x, float[8, 4] dy) => (float[5, 4] y) <int64[2] shape_5x8 = {5, 8}> {
    y_copy = Transpose <perm: ints = [1, 0]> (x)
    y_operand = Reshape (y_copy, shape_5x8)
    y = com.microsoft.FusedMatMul <alpha: float = 0.5> (y_operand, dy)
}
""",
    )


def test_beside_an_operand_that_is_too_large_the_other_one_is_transposed_and_the_result() -> None:
    assert_rewrites(
        SMALL,
        HEADER
        + """
g (float[8, 9] x, float[8, 4] dy) => (float[9, 4] y) {
    y = com.microsoft.FusedMatMul <transA: int = 1> (x, dy)
}
""",
        HEADER
        + """
g (float[8, 9] x, float[8, 4] dy) => (float[9, 4] y) <int64[2] shape_4x8 = {4, 8}> {
    y_copy = Transpose <perm: ints = [1, 0]> (dy)
    y_operand = Reshape (y_copy, shape_4x8)
    y_transposed = MatMul (y_operand, x)
    y = Transpose <perm: ints = [1, 0]> (y_transposed)
}
""",
    )


@pytest.mark.parametrize(
    "body",
    [
        "g (float[8, 5] x, float[8, 3] dy) => (float[5, 3] y)"
        " { y = com.microsoft.FusedMatMul <transA: int = 1> (x, dy) }",
        "g (float[3, 5] x, float[3, 4] dy) => (float[5, 4] y)"
        " { y = com.microsoft.FusedMatMul <transA: int = 1> (x, dy) }",
        "g (float[8, 9] x, float[8, 5] dy) => (float[9, 5] y)"
        " { y = com.microsoft.FusedMatMul <transA: int = 1> (x, dy) }",
        "g (float[20, 9] x, float[20, 4] dy) => (float[9, 4] y)"
        " { y = com.microsoft.FusedMatMul <transA: int = 1> (x, dy) }",
        "g (double[8, 5] x, double[8, 4] dy) => (double[5, 4] y)"
        " { y = com.microsoft.FusedMatMul <transA: int = 1> (x, dy) }",
        "g (float[n, 5] x, float[n, 4] dy) => (float[5, 4] y)"
        " { y = com.microsoft.FusedMatMul <transA: int = 1> (x, dy) }",
        "g (float[2, 8, 5] x, float[2, 8, 4] dy) => (float[2, 5, 4] y)"
        " { y = com.microsoft.FusedMatMul <transA: int = 1> (x, dy) }",
        "g (float[8, 5] x, float[4, 8] dy) => (float[5, 4] y)"
        " { y = com.microsoft.FusedMatMul <transA: int = 1, transB: int = 1> (x, dy) }",
        "g (float[5, 8] x, float[8, 4] dy) => (float[5, 4] y)"
        " { y = com.microsoft.FusedMatMul <alpha: float = 0.5> (x, dy) }",
    ],
    ids=[
        "few columns",
        "few rows",
        "a large operand of no other ratio",
        "two large operands",
        "double",
        "symbolic",
        "a batch",
        "both transposed",
        "none transposed",
    ],
)
def test_the_nearest_other_products_stay(body: str) -> None:
    assert_rewrites(SMALL, HEADER + body, HEADER + body)


@pytest.mark.parametrize("sizes", [(512, 300, 256), (520, 8200, 256)], ids=["operand", "result"])
def test_the_numbers_are_the_product_also_after_onnx_runtimes_own_fusions(sizes: tuple[int, int, int]) -> None:
    k, m, n = sizes
    text = f"g (float[{k}, {m}] x, float[{k}, {n}] dy) => (float[{m}, {n}] y)"
    model = ir.from_onnx_text(HEADER + text + " { y = com.microsoft.FusedMatMul <transA: int = 1> (x, dy) }")
    assert TransposeOnce()(model).modified
    session = onnxruntime().InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    generator = np.random.default_rng(0)
    x, dy = generator.standard_normal((k, m), np.float32), generator.standard_normal((k, n), np.float32)
    expected = x.T.astype(np.float64) @ dy
    np.testing.assert_allclose(session.run(None, {"x": x, "dy": dy})[0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("opset", "modified"), [(8, False), (9, True)])
def test_a_model_of_an_old_opset_stays_valid(opset: int, modified: bool) -> None:
    model = ir.from_onnx_text(f"""<ir_version: 3, opset_import: ["" : {opset}, "com.microsoft" : 1]>
        g (float[256, 8] a, float[256, 256] b) => (float[8, 256] y) {{
            y = com.microsoft.FusedMatMul <transA = 1> (a, b) }}""")
    assert TransposeOnce()(model).modified == modified
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
