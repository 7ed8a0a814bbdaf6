"""Graph before, graph after; and the matmuls of ONNX Runtime's kernels."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

from ort_dynamo.passes.onnx.multiply_small_matrices import MultiplySmallMatrices
from ort_dynamo.runtime.installed.importing import onnxruntime
from ort_dynamo.testing import assert_rewrites

HEADER = '<ir_version: 10, opset_import: ["" : 20, "com.microsoft" : 1]>\n'


def test_a_matmul_of_small_matrices_becomes_products_and_sums_with_the_batch_last() -> None:
    assert_rewrites(
        MultiplySmallMatrices(),
        f"{HEADER} g (float[512, 2, 3] a, float[512, 3, 4] b) => (float[512, 2, 4] y) {{ y = MatMul (a, b) }}",
        f"""{HEADER} g (float[512, 2, 3] a, float[512, 3, 4] b) => (float[512, 2, 4] y)
        <int64[2] "shape_-1x6" = {{-1, 6}}, int64[6] rows_6 = {{0, 1, 2, 3, 4, 5}},
         int64[4] "shape_2x3x1x-1" = {{2, 3, 1, -1}}, int64[2] "shape_-1x12" = {{-1, 12}},
         int64[12] rows_12 = {{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}}, int64[4] "shape_1x3x4x-1" = {{1, 3, 4, -1}},
         int64[1] axes_1 = {{1}}, int64[2] "shape_8x-1" = {{8, -1}}, int64[3] shape_512x2x4 = {{512, 2, 4}}> {{
            y_reshape = Reshape (a, "shape_-1x6")
            y_transpose = Transpose <perm: ints = [1, 0]> (y_reshape)
            y_gather = Gather <axis: int = 0> (y_transpose, rows_6)
            y_reshape_2 = Reshape (y_gather, "shape_2x3x1x-1")
            y_reshape_3 = Reshape (b, "shape_-1x12")
            y_transpose_2 = Transpose <perm: ints = [1, 0]> (y_reshape_3)
            y_gather_2 = Gather <axis: int = 0> (y_transpose_2, rows_12)
            y_reshape_4 = Reshape (y_gather_2, "shape_1x3x4x-1")
            y_mul = Mul (y_reshape_2, y_reshape_4)
            y_reducesum = ReduceSum <keepdims: int = 0> (y_mul, axes_1)
            y_reshape_5 = Reshape (y_reducesum, "shape_8x-1")
            y_transpose_3 = Transpose <perm: ints = [1, 0]> (y_reshape_5)
            y = Reshape (y_transpose_3, shape_512x2x4)
        }}""",
    )


@pytest.mark.parametrize("flags", range(4))
@pytest.mark.parametrize("batch", ["4096", "N, 300"])
def test_the_batch_stays_last_after_onnx_runtimes_optimizers(batch: str, flags: int, tmp_path: Path) -> None:
    model = ir.from_onnx_text(
        f"""{HEADER} g (float[{batch}, 3, 3] a, float[{batch}, 3, 3] b) => (float[{batch}, 3, 3] y) {{
            y = com.microsoft.FusedMatMul <transA = {flags & 1}, transB = {flags >> 1}> (a, b)
        }}"""
    )
    assert MultiplySmallMatrices()(model).modified
    settings = onnxruntime().SessionOptions()
    settings.optimized_model_filepath, settings.log_severity_level = str(tmp_path / "optimized.onnx"), 3
    onnxruntime().InferenceSession(ir.to_proto(model).SerializeToString(), settings, ["CPUExecutionProvider"])
    operators = [
        node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node if node.op_type != "Reshape"
    ]
    first = ["Transpose", "Gather", "Transpose", "Gather", "Mul", "ReduceSum"]
    assert operators[: len(first)] == first
    assert set(operators[len(first) :]) == {"Transpose"}


@pytest.mark.parametrize(
    ("inputs", "result", "call"),
    [
        ("float[512, 6, 6] a, float[512, 6, 6] b", "512, 6, 6", "MatMul"),  # many products
        ("float[512, 1, 128] a, float[512, 128, 1] b", "512, 1, 1", "MatMul"),  # few products of many elements
        ("float[512, 3, 0] a, float[512, 0, 4] b", "512, 3, 4", "MatMul"),
        ("float[512, 0, 3] a, float[512, 3, 4] b", "512, 0, 4", "MatMul"),
        ("float[100, 2, 3] a, float[100, 3, 2] b", "100, 2, 2", "MatMul"),  # few matrices
        ("float[512, 3] a, float[3, 3] b", "512, 3", "MatMul"),
        ("float[512, 3, 3] a, float[3, 3] b", "512, 3, 3", "MatMul"),
        ("float[512, 3, 3] a, float[1, 3, 3] b", "512, 3, 3", "MatMul"),
        ("float[512, N, 3] a, float[512, 3, 3] b", "512, N, 3", "MatMul"),
        ("float[512, 3, 3] a, float[512, 3, 3] b", "512, 3, 3", "com.microsoft.FusedMatMul <alpha: float = 2.>"),
        ("float[512, 3, 3] a, float[3, 512, 3] b", "512, 3, 3", "com.microsoft.FusedMatMul <transBatchB: int = 1>"),
    ],
)
def test_other_matmuls_stay(inputs: str, result: str, call: str) -> None:
    text = f"{HEADER} g ({inputs}) => (float[{result}] y) {{ y = {call} (a, b) }}"
    model = ir.from_onnx_text(text)
    assert not MultiplySmallMatrices()(model).modified


def test_old_opsets_stay() -> None:
    text = (
        '<ir_version: 7, opset_import: ["" : 12]> g (float[512, 3, 3] a) => (float[512, 3, 3] y) { y = MatMul (a, a) }'
    )
    assert not MultiplySmallMatrices()(ir.from_onnx_text(text)).modified


def test_a_matmul_that_is_left_says_why(caplog: pytest.LogCaptureFixture) -> None:
    text = f"{HEADER} g (float[M, N, 3, 3] a) => (float[M, N, 3, 3] y) {{ y = MatMul (a, a) }}"
    with caplog.at_level(logging.DEBUG, "ort_dynamo"):
        assert_rewrites(MultiplySmallMatrices(), text, text)
    assert "leaves y (MatMul): several sizes of its batch are not known" in caplog.text


def test_more_threads_multiply_smaller_matrices() -> None:
    assert [MultiplySmallMatrices.of(threads).largest for threads in (1, 2, 16)] == [256, 256, 32]


@pytest.mark.parametrize("flags", range(4))
@pytest.mark.parametrize("seed", range(8))
def test_random_matmuls_are_as_exact(seed: int, flags: int) -> None:
    random = np.random.default_rng([seed, flags])
    kind, dtype = [("float", np.float32), ("double", np.float64)][seed % 2]
    batch = [int(size) for size in random.integers(1, 9, random.integers(1, 3))]
    rows, inner, columns = (int(size) for size in random.integers(1, 6, 3))
    named, empty = bool(random.integers(2)), not random.integers(4)
    shapes = [inner, rows] if flags & 1 else [rows, inner], [columns, inner] if flags & 2 else [inner, columns]
    given = [random.standard_normal([*batch, *shape]).astype(dtype) for shape in shapes]
    if named and empty:
        given = [value[:0] for value in given]
    else:
        given[0].flat[0] = random.choice([np.inf, np.nan, 1.0])
    a, b, y = (declared([*batch, *shape], named) for shape in (*shapes, [rows, columns]))
    call = f"com.microsoft.FusedMatMul <transA = {flags & 1}, transB = {flags >> 1}>" if flags else "MatMul"
    model = ir.from_onnx_text(f"{HEADER} g ({kind}{a} a, {kind}{b} b) => ({kind}{y} y) {{ y = {call} (a, b) }}")
    assert MultiplySmallMatrices(least=1)(model).modified
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    session = onnxruntime().InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, dict(zip("ab", given, strict=True)))
    left, right = (value.astype(np.longdouble) for value in given)
    left, right = left.swapaxes(-1, -2) if flags & 1 else left, right.swapaxes(-1, -2) if flags & 2 else right
    with np.errstate(invalid="ignore"):
        expected, size = left @ right, np.abs(left) @ np.abs(right)
    exact = np.isfinite(expected)
    np.testing.assert_array_equal(found[~exact], expected[~exact].astype(dtype))
    assert (np.abs(found[exact] - expected[exact]) <= inner * np.finfo(dtype).eps * size[exact]).all()


def declared(sizes: list[int], named: bool) -> str:
    """The shape as ONNX's text has it, where the first size may have a name."""
    return f"[{', '.join(['N' if named else str(sizes[0]), *map(str, sizes[1:])])}]"


@pytest.mark.parametrize("dynamic", [False, True])
def test_rotations_of_points_have_eagers_gradients(dynamic: bool) -> None:
    def moved(angles: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
        sine, cosine = angles.sin(), angles.cos()
        turns = torch.stack([cosine, -sine, sine, cosine], -1).unflatten(-1, (2, 2))
        centered = points - points.mean(1, keepdim=True)
        near = centered / (centered.norm(dim=-1, keepdim=True) + 0.5)
        return (turns @ turns.mT + turns) @ near[..., None] * torch.tensor([[1.5], [-2.0]])

    torch.manual_seed(0)
    angles, points = torch.randn(24, 300, dtype=torch.float64), torch.randn(24, 300, 2, dtype=torch.float64)
    results = []
    for run in (moved, torch.compile(moved, backend="ort_train", dynamic=dynamic)):
        given = [angles.clone().requires_grad_(), points.clone().requires_grad_()]
        result = run(*given)
        result.square().sum().backward()
        results.append([result.detach(), *(value.grad for value in given)])
    torch.testing.assert_close(results[1], results[0])
