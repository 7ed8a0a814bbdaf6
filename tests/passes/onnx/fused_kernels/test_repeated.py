"""Tests of the nodes that a kernel computes again instead of reading their results."""

from __future__ import annotations

import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from generated_graphs import inputs_of
from test_fuse_kernels import HEADER, assert_fused_alike, fused

from ort_dynamo.graph.fused_op import DOMAIN

GRADIENT = """g (bfloat16[4096,64] gradient, bfloat16[4096,64] x, float[64] scale, float[64] bias)
  => (float[64] total, bfloat16[4096,64] y)
  <int64[1] first = {0}, float zero = {0}> {
  wide = Cast<to=1>(x)
  scaled = Mul(wide, scale)
  sum = Add(scaled, bias)
  image = FUNCTION(sum)
  mask = LessOrEqual(image, zero)
  given = Cast<to=1>(gradient)
  masked = Where(mask, zero, given)
  along = Mul(masked, wide)
  total = ReduceSum<keepdims=0>(along, first)
  share = Mul(wide, total)
  left = Sub(masked, share)
  y = Cast<to=16>(left)
}"""
"""A gradient with a mask: a sum over rows, and the rows that read the sum, both from `gradient` and `x`."""


def large_inputs(model: ir.Model) -> list[set[str]]:
    """Return the names of the tensors with elements for each row that each kernel reads, in order."""
    kernels = [node for node in model.graph if node.domain == DOMAIN]
    inputs = ([one for one in node.inputs if one is not None] for node in kernels)
    return [{str(one.name) for one in values if list(one.shape or ()) == [4096, 64]} for values in inputs]


@pytest.mark.parametrize(
    ("function", "again"),
    [("Abs", {"gradient", "x"}), ("Neg", {"gradient", "x"}), ("Exp", {"gradient", "x", "mask"})],
)
def test_mask_of_a_tensor_that_the_kernel_reads_is_computed_again(function: str, again: set[str]) -> None:
    """An exponential takes the time of reading a mask, so the first kernel writes the mask."""
    plain = onnx.parser.parse_model(HEADER + GRADIENT.replace("FUNCTION", function))
    model = fused(plain)
    first, parts, second = large_inputs(model)
    assert (first, parts, second) == ({"gradient", "x"}, set(), again)
    assert_fused_alike(plain, model, inputs_of(plain, 0, {}), 2e-2)


SHAPED = """g (bfloat16[N, T, 8] x, float["N*T", 8] other, float[8] scale) => (float[8] total, float[N, T, 8] y)
  <bfloat16["N*T", 8] flat, float[N, T, 8] put, int64[2] rows = {-1, 8}, int64[1] width = {8}, int64[1] first = {0},
   float zero = {0}> {
  flat = Reshape(x, rows)
  wide = Cast<to=1>(flat)
  scaled = Mul(wide, scale)
  mask = LessOrEqual(scaled, zero)
  masked = Where(mask, zero, wide)
  total = ReduceSum<keepdims=0>(masked, first)
  n = Shape<start=0, end=1>(x)
  t = Shape<start=1, end=2>(x)
  shape = Concat<axis=0>(n, t, width)
  spread = Mul(other, total)
  kept = Where(mask, spread, other)
  put = Reshape(kept, shape)
  y = Neg(put)
}"""
"""A kernel that reads a mask, and the shape of the tensor that makes it."""


def test_tensor_read_for_its_shape_costs_its_bytes() -> None:
    model = fused(onnx.parser.parse_model(HEADER + SHAPED))
    last = [node for node in model.graph if node.domain == DOMAIN][-1]
    assert {one.name for one in last.inputs if one is not None} == {"mask", "other", "total", "x"}
