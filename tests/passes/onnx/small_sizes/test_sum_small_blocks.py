"""Graph before, graph after; and the sums of ONNX Runtime's kernels."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from ort_dynamo.passes.onnx.sum_small_blocks import SumSmallBlocks
from ort_dynamo.runtime.installed.importing import onnxruntime
from ort_dynamo.testing import assert_rewrites

HEADER = '<ir_version: 10, opset_import: ["" : 20]>\n'


def test_a_sum_of_the_rows_of_small_blocks_reads_a_transposed_tensor() -> None:
    assert_rewrites(
        SumSmallBlocks(),
        f"""{HEADER} g (float[N, 64, 3, 4] x) => (float[N, 64, 1, 4] y) <int64[1] axes = {{-2}}> {{
            y = ReduceSum (x, axes)
        }}""",
        f"""{HEADER} g (float[N, 64, 3, 4] x) => (float[N, 64, 1, 4] y)
        <int64[1] axes = {{-2}}, int64[3] "shape_-1x3x4" = {{-1, 3, 4}}, int64[2] "shape_-1x3" = {{-1, 3}},
         int64[1] axes_1 = {{1}}, int64[2] "shape_4x-1" = {{4, -1}}, int64[4] "shape_-1x64x1x4" = {{-1, 64, 1, 4}}> {{
            y_reshape = Reshape (x, "shape_-1x3x4")
            y_transpose = Transpose <perm: ints = [2, 0, 1]> (y_reshape)
            y_reshape_2 = Reshape (y_transpose, "shape_-1x3")
            y_reducesum = ReduceSum <keepdims: int = 0> (y_reshape_2, axes_1)
            y_reshape_3 = Reshape (y_reducesum, "shape_4x-1")
            y_transpose_2 = Transpose <perm: ints = [1, 0]> (y_reshape_3)
            y = Reshape (y_transpose_2, "shape_-1x64x1x4")
        }}""",
    )


@pytest.mark.parametrize(
    ("shape", "axes", "result"),
    [
        ("512, 3, 1", "1", "512, 1"),  # the last axis with elements
        ("512, 1, 3", "1", "512, 3"),
        ("100, 3, 4", "1", "100, 4"),  # few blocks
        ("512, 32, 8", "1", "512, 8"),  # large blocks
        ("512, 3, 2, 4", "0, 2", "3, 4"),
        ("512, 3, 4", "0", "3, 4"),
        ("512, 3, N", "1", "512, N"),
        ("512, N, 3", "1", "512, 3"),
        ("0, 3, 4", "1", "0, 4"),
        ("512, 3, 0", "1", "512, 0"),
    ],
)
def test_other_sums_stay(shape: str, axes: str, result: str) -> None:
    text = f"""{HEADER} g (float[{shape}] x) => (float[{result}] y) <int64[{axes.count(",") + 1}] axes = {{{axes}}}> {{
        y = ReduceSum <keepdims: int = 0> (x, axes)
    }}"""
    assert_rewrites(SumSmallBlocks(), text, text)


@pytest.mark.parametrize(
    "text",
    [
        "g (float[500, 3, 4] x) => (float[500, 4] y) <int64[1] axes = {1}> { y = ReduceSum <keepdims = 0> (x, axes) }",
        "g (float[N, 64, 3, 4] x) => (float[N, 64, 1, 4] y) <int64[1] axes = {2}> { y = ReduceMean (x, axes) }",
    ],
)
def test_the_sum_of_rows_survives_onnx_runtimes_optimizers(text: str, tmp_path: Path) -> None:
    model = ir.from_onnx_text(HEADER + text)
    assert SumSmallBlocks().call(model).modified
    settings = onnxruntime().SessionOptions()
    settings.optimized_model_filepath, settings.log_severity_level = str(tmp_path / "optimized.onnx"), 3
    onnxruntime().InferenceSession(ir.to_proto(model).SerializeToString(), settings, ["CPUExecutionProvider"])
    operators = [
        node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node if node.op_type != "Reshape"
    ]
    assert operators in (["Transpose", kind, "Transpose"] for kind in ("ReduceMean", "ReduceSum"))


def test_an_axis_that_no_runtime_takes_stays() -> None:
    text = (
        f"{HEADER} g (float[512, 3, 4] x) => (float[a, b, c] y) <int64[1] axes = {{4}}> {{ y = ReduceSum (x, axes) }}"
    )
    assert not SumSmallBlocks().call(ir.from_onnx_text(text)).modified


def test_axes_that_are_an_input_may_change() -> None:
    text = f"{HEADER} g (float[512, 3, 4] x, int64[1] axes) => (float[a, b, c] y) {{ y = ReduceSum (x, axes) }}"
    assert_rewrites(SumSmallBlocks(), text, text)


def test_old_opsets_stay() -> None:
    text = '<ir_version: 7, opset_import: ["" : 12]> g (float[512, 3, 4] x) => (float[512, 4] y)'
    text += " { y = ReduceSum <axes = [1], keepdims = 0> (x) }"
    assert not SumSmallBlocks()(ir.from_onnx_text(text)).modified


def test_a_sum_that_is_left_says_why(caplog: pytest.LogCaptureFixture) -> None:
    text = f"""{HEADER} g (float[M, N, 3, 4] x) => (float[M, N, 4] y) <int64[1] axes = {{2}}> {{
        y = ReduceSum <keepdims: int = 0> (x, axes)
    }}"""
    with caplog.at_level(logging.DEBUG, "ort_dynamo"):
        assert_rewrites(SumSmallBlocks(), text, text)
    assert "SumSmallBlocks leaves y (ReduceSum): several sizes of its result are not known" in caplog.text


def test_more_threads_share_smaller_blocks() -> None:
    assert [SumSmallBlocks.of(threads).largest for threads in (1, 2, 16)] == [128, 128, 16]


@pytest.mark.parametrize("seed", range(40))
def test_random_sums_have_the_same_elements(seed: int) -> None:
    random = np.random.default_rng(seed)
    kind, dtype = [("float", np.float32), ("double", np.float64), ("int32", np.int32), ("int64", np.int64)][seed % 4]
    lead, rows, tail = ([int(size) for size in random.integers(1, 5, random.integers(1, 3))] for _ in range(3))
    named, empty = bool(random.integers(2)), not random.integers(6)
    sizes = [*lead, *rows, *tail]
    axes = list(range(len(lead), len(lead) + len(rows)))
    keepdims, operator = int(random.integers(2)), "ReduceMean" if kind == "double" and seed % 8 < 4 else "ReduceSum"
    result = [*lead, *([1] * len(rows) if keepdims else []), *tail]
    ends = f"({kind}{declared(sizes, named)} x) => ({kind}{declared(result, named)} y)"
    model = ir.from_onnx_text(f"""{HEADER} g {ends}
    <int64[{len(axes)}] axes = {{{str(axes)[1:-1]}}}> {{ y = {operator} <keepdims = {keepdims}> (x, axes) }}""")
    expected = np.prod(rows) > 1 and np.prod(tail) > 1
    assert SumSmallBlocks(least=1)(model).modified == expected
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    session = onnxruntime().InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    x = (random.integers(-9, 9, [0 if named and empty else sizes[0], *sizes[1:]]) / 4).astype(dtype)  # sums are exact
    (found,) = session.run(None, {"x": x})
    total = x.sum(tuple(axes), dtype=dtype, keepdims=bool(keepdims))
    if operator == "ReduceMean":
        total = total / np.prod(rows)
    np.testing.assert_allclose(found, total, rtol=1e-15, strict=True)


def declared(sizes: list[int], named: bool) -> str:
    """The shape as ONNX's text has it, where the first size may have a name."""
    return f"[{', '.join(['N' if named else str(sizes[0]), *map(str, sizes[1:])])}]"
