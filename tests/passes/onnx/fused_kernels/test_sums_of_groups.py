"""Sums over the rows of each image of a batch, each a result for every column."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from generated_graphs import inputs_of
from test_fuse_kernels import HEADER, assert_fused_alike, assert_same, fused, interpreted

from ort_dynamo.graph.fused_op import DOMAIN
from ort_dynamo.runtime.kernels.kernel_compiler import triton_version

SUMS = """g (bfloat16[N,H,W,C] x, float[C] w) => (float[N,C] each, float[N,1,1,C] squares, float[C] all)
  <int64[2] inner = {1, 2}, int64[3] outer = {0, 1, 2}> {
  wide = Cast<to=1>(x)
  scaled = Mul(wide, w)
  square = Mul(scaled, scaled)
  each = ReduceSum<keepdims=0>(scaled, inner)
  squares = ReduceSum<keepdims=1>(square, inner)
  all = ReduceSum<keepdims=0>(scaled, outer)
}"""


def sums(n: int, h: int, w: int, c: int) -> onnx.ModelProto:
    text = SUMS
    for name, size in zip("NHWC", (n, h, w, c), strict=True):
        text = text.replace(f"{name},", f"{size},").replace(f"{name}]", f"{size}]")
    return onnx.parser.parse_model(HEADER + text)


@pytest.mark.parametrize(
    ("shape", "kernels"),
    [
        *(((2, 4, 4, 8), 2), ((3, 5, 7, 40), 2), ((4, 32, 32, 64), 3), ((2, 37, 37, 100), 3), ((2, 1, 4099, 16), 2)),
        *(((64, 8, 8, 24), 2), ((1, 16, 16, 8), 2), ((5, 2, 1, 128), 2)),
    ],
)
def test_sums_are_of_the_rows_of_each_image(shape: tuple[int, int, int, int], kernels: int) -> None:
    """One kernel adds up parts; another adds the parts of each image, a third those of all."""
    plain = sums(*shape)
    model = fused(plain)
    inputs = inputs_of(plain, 0, {})
    assert_fused_alike(plain, model, inputs, 1e-4)
    assert Counter(node.domain for node in model.graph)[DOMAIN] == kernels
    if triton_version() is not None:
        assert_interpreted_alike(model, inputs)


def assert_interpreted_alike(model: ir.Model, inputs: Mapping[str, np.ndarray]) -> None:
    """Compare each fused node by Triton's interpreter with its NumPy form."""
    for found, right in interpreted(model, inputs):
        assert_same(found, right, 1e-5)


NORM = """g (bfloat16[3,30,28,24] x, float[4,6] w) => (bfloat16[3,30,28,24] y, float[3,4] mean)
  <int64[5] cut = {3, 30, 28, 4, 6}, int64[4] whole = {3, 30, 28, 24}, int64[5] spread = {3, 1, 1, 4, 1},
   int64[2] inner = {1, 2}, int64[1] last = {2}, float part = {0.000198412698}, float eps = {0.001}> {
  wide = Cast<to=1>(x)
  image = Reshape(wide, cut)
  each = ReduceSum<keepdims=0>(image, inner)
  sum = ReduceSum<keepdims=0>(each, last)
  mean = Mul(sum, part)
  m = Reshape(mean, spread)
  less = Sub(image, m)
  square = Mul(less, less)
  squares = ReduceSum<keepdims=0>(square, inner)
  total = ReduceSum<keepdims=0>(squares, last)
  variance = Mul(total, part)
  safe = Add(variance, eps)
  root = Sqrt(safe)
  d = Reshape(root, spread)
  scaled = Div(less, d)
  weighted = Mul(scaled, w)
  joined = Reshape(weighted, whole)
  y = Cast<to=16>(joined)
}"""
"""A group norm of 3 images in channels_last."""


def test_group_norm_reads_the_image_in_three_kernels() -> None:
    plain = onnx.parser.parse_model(HEADER + NORM)
    model = fused(plain)
    assert {node.op_type for node in model.graph if not node.domain} <= {"Reshape"}
    reading = [node for node in model.graph if any(one is not None and one.name == "x" for one in node.inputs)]
    assert len(reading) == 3
    inputs = inputs_of(plain, 0, {})
    assert_fused_alike(plain, model, inputs, 2e-2)
    if triton_version() is not None:
        assert_interpreted_alike(model, inputs)


@pytest.mark.parametrize(("channels", "kernels"), [(24, 2), (1 << 18, 3)])
def test_small_readers_of_one_kernels_results_are_one_kernel(channels: int, kernels: int) -> None:
    """The gradient of a group norm reads two sums for each image, each for itself: so little that launches decide."""
    text = f"""g (float[6,8,{channels}] x, float[6,8,{channels}] g) => (float[6,4] a, float[6,4] b)
      <int64[1] one = {{1}}, int64[1] last = {{2}}, int64[3] cut = {{6, 4, {channels // 4}}}> {{
      e = Exp(g)
      s = ReduceSum<keepdims=0>(e, one)
      xe = Mul(x, e)
      t = ReduceSum<keepdims=0>(xe, one)
      sg = Reshape(s, cut)
      tg = Reshape(t, cut)
      st = Tanh(sg)
      tt = Tanh(tg)
      a = ReduceSum<keepdims=0>(st, last)
      b = ReduceSum<keepdims=0>(tt, last)
    }}"""
    plain = onnx.parser.parse_model(HEADER + text)
    model = fused(plain)
    assert len([node for node in model.graph if node.domain == DOMAIN]) == kernels
    if channels < 1000:
        assert_fused_alike(plain, model, inputs_of(plain, 0, {}), 1e-5)


@pytest.mark.parametrize(("images", "rows", "kernels"), [(3, 7, 1), (4, 600, 2), (2, 37, 1)])
def test_whole_rows_are_summed_for_each_image(images: int, rows: int, kernels: int) -> None:
    text = f"""g (float[{images},{rows},40] x) => (float[{images},40] s)
      <int64[1] one = {{1}}, int64[1] last = {{-1}}> {{
      largest = ReduceMax<keepdims=1>(x, last)
      less = Sub(x, largest)
      e = Exp(less)
      s = ReduceSum<keepdims=0>(e, one)
    }}"""
    plain = onnx.parser.parse_model(HEADER + text)
    model = fused(plain)
    assert len([node for node in model.graph if node.domain == DOMAIN]) == kernels
    inputs = inputs_of(plain, 0, {})
    assert_fused_alike(plain, model, inputs, 1e-5)
    if triton_version() is not None:
        assert_interpreted_alike(model, inputs)


def test_sums_of_other_groups_are_other_kernels() -> None:
    text = """g (float[4,6,8,32] x) => (float[4,8,32] a, float[4,6,32] b, float[4,32] c)
      <int64[1] one = {1}, int64[1] two = {2}, int64[2] both = {1, 2}> {
      e = Exp(x)
      a = ReduceSum<keepdims=0>(e, one)
      b = ReduceSum<keepdims=0>(e, two)
      c = ReduceSum<keepdims=0>(e, both)
    }"""
    plain = onnx.parser.parse_model(HEADER + text)
    assert_fused_alike(plain, fused(plain), inputs_of(plain, 0, {}), 1e-5)


@pytest.mark.parametrize("sizes", [(6, 32), (4, 1024), (8, 185)], ids=str)
@pytest.mark.parametrize("batch", [0, 1, 3, 20])
def test_sums_of_a_symbolic_batch_are_kernels(sizes: tuple[int, int], batch: int) -> None:
    text = """g (float[N,L,R,32] x) => (float[N,L,32] a, float[N,L,1,32] b, float[32] c, float[N,L,R,32] e)
      <int64[1] two = {2}, int64[3] all = {0, 1, 2}> {
      n = Neg(x)
      e = Exp(n)
      a = ReduceSum<keepdims=0>(e, two)
      square = Mul(e, e)
      b = ReduceSum<keepdims=1>(square, two)
      c = ReduceSum<keepdims=0>(e, all)
    }"""
    for name, size in zip("LR", sizes, strict=True):
        text = text.replace(f",{name},", f",{size},")
    plain = onnx.parser.parse_model(HEADER + text)
    model = fused(plain)
    assert {node.op_type for node in model.graph if not node.domain} <= {"Reshape"}
    inputs = inputs_of(plain, 0, {"N": batch})
    assert_fused_alike(plain, model, inputs, 1e-4)
    if triton_version() is not None:
        assert_interpreted_alike(model, inputs)


@pytest.mark.parametrize("batch", ["N", "2*N", "N + 1", "(N + 1)*2"])
def test_parts_of_images_have_the_dimension_of_the_batch(batch: str) -> None:
    """The kernel that adds the parts needs their dimension, by the same name, for the size of its results."""
    text = """g (float[4,1024,32] x) => (float[4,32] a, float[4,1,32] b) <int64[1] one = {1}> {
      e = Exp(x)
      a = ReduceSum<keepdims=0>(e, one)
      b = ReduceSum<keepdims=1>(e, one)
    }"""
    plain = onnx.parser.parse_model(HEADER + text)
    for value in (*plain.graph.input, *plain.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = batch
    model = fused(plain)
    assert {node.op_type for node in model.graph if not node.domain} <= {"Reshape"}
    assert_fused_alike(plain, model, {"x": np.ones((6, 1024, 32), np.float32)}, 1e-4)
