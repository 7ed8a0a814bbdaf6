"""Graph before, graph after; and the sums of ONNX Runtime's kernels."""

from __future__ import annotations

import logging

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
        <int64[1] axes = {{-2}}, int64[3] "shape_-1x3x4" = {{-1, 3, 4}}, int64[1] axes_2 = {{2}},
         int64[4] "shape_-1x64x1x4" = {{-1, 64, 1, 4}}> {{
            y_reshape = Reshape (x, "shape_-1x3x4")
            y_transpose = Transpose <perm: ints = [2, 0, 1]> (y_reshape)
            y_reducesum = ReduceSum <keepdims: int = 0> (y_transpose, axes_2)
            y_transpose_2 = Transpose <perm: ints = [1, 0]> (y_reducesum)
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
    ],
)
def test_other_sums_stay(shape: str, axes: str, result: str) -> None:
    text = f"""{HEADER} g (float[{shape}] x) => (float[{result}] y) <int64[{axes.count(",") + 1}] axes = {{{axes}}}> {{
        y = ReduceSum <keepdims: int = 0> (x, axes)
    }}"""
    assert_rewrites(SumSmallBlocks(), text, text)


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
    keepdims = int(random.integers(2))
    result = [*lead, *([1] * len(rows) if keepdims else []), *tail]
    ends = f"({kind}{declared(sizes, named)} x) => ({kind}{declared(result, named)} y)"
    model = ir.from_onnx_text(f"""{HEADER} g {ends}
    <int64[{len(axes)}] axes = {{{str(axes)[1:-1]}}}> {{ y = ReduceSum <keepdims = {keepdims}> (x, axes) }}""")
    expected = np.prod(rows) > 1 and np.prod(tail) > 1
    assert SumSmallBlocks(least=1)(model).modified == expected
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    session = onnxruntime().InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    x = (random.integers(-9, 9, [0 if named and empty else sizes[0], *sizes[1:]]) / 4).astype(dtype)  # sums are exact
    (found,) = session.run(None, {"x": x})
    np.testing.assert_array_equal(found, x.sum(tuple(axes), dtype=dtype, keepdims=bool(keepdims)), strict=True)


def declared(sizes: list[int], named: bool) -> str:
    """The shape as ONNX's text has it, where the first size may have a name."""
    return f"[{', '.join(['N' if named else str(sizes[0]), *map(str, sizes[1:])])}]"
