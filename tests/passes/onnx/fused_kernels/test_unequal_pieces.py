"""Parts of unequal size become kernels of equal pieces, such as rotary embeddings of some columns."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from generated_graphs import TextMaker, inputs_of
from test_fuse_kernels import HEADER, assert_fused_alike, fused

from ort_dynamo.graph.fused_op import DOMAIN

PARTIAL = """g (float[2,16,4,64] x, float[16,16] cosine, float[16,16] sine) => (float[2,4,16,64] y)
  <int64[1] zero = {0}, int64[1] half = {8}, int64[1] some = {16}, int64[1] all = {64}, int64[1] last = {3}> {
  t = Transpose<perm=[0,2,1,3]>(x)
  r = Slice(t, zero, some, last)
  rest = Slice(t, some, all, last)
  second = Slice(r, half, some, last)
  n = Neg(second)
  first = Slice(r, zero, half, last)
  halves = Concat<axis=3>(n, first)
  a = Mul(r, cosine)
  b = Mul(halves, sine)
  turned = Add(a, b)
  y = Concat<axis=3>(turned, rest)
}"""

GRADIENT = """g (float[2,4,16,64] g, float[16,16] cosine, float[16,16] sine) => (float[2,16,4,64] y)
  <int64[1] zero = {0}, int64[1] half = {8}, int64[1] some = {16}, int64[1] all = {64}, int64[1] last = {3}> {
  r = Slice(g, zero, some, last)
  rest = Slice(g, some, all, last)
  a = Mul(r, cosine)
  b = Mul(r, sine)
  first = Slice(b, zero, half, last)
  n = Neg(first)
  second = Slice(b, half, some, last)
  halves = Concat<axis=3>(second, n)
  turned = Add(a, halves)
  whole = Concat<axis=3>(turned, rest)
  y = Transpose<perm=[0,2,1,3]>(whole)
}"""


@pytest.mark.parametrize("text", [PARTIAL, GRADIENT], ids=["forward", "gradient"])
def test_a_rotary_embedding_of_some_columns_is_one_kernel(text: str) -> None:
    model = fused(text)
    assert [node.domain for node in model.graph] == [DOMAIN]
    plain = onnx.parser.parse_model(HEADER + text)
    assert_fused_alike(plain, model, inputs_of(plain, 0), 1e-5)


class PartsMaker(TextMaker):
    """Makes a graph of a seed that cuts an axis into unequal parts, computes with them, and joins them."""

    def cut(self, value: str, start: int, end: int, axis: int) -> str:
        return self.node(f"Slice({value}, {self.constant(start)}, {self.constant(end)}, {self.constant(axis)})")

    def changed(self, part: str, width: int, axis: int) -> str:
        kind = self.random.choice(["nothing", "nothing", "Neg", "Tanh", "twice", "halves"])
        if kind == "nothing":
            return part
        if kind == "twice":
            return self.node(f"Add({part}, {self.node(f'Tanh({part})')})")
        if kind != "halves" or width % 2:
            return self.node(f"{kind if kind != 'halves' else 'Neg'}({part})")
        first, second = self.cut(part, 0, width // 2, axis), self.cut(part, width // 2, width, axis)
        turned = self.node(f"Concat<axis={axis}>({self.node(f'Neg({second})')}, {first})")
        return self.node(f"Add({part}, {turned})")

    def text(self) -> str:
        axis, piece = self.random.choice([1, 2]), self.random.choice([1, 4, 8, 24])
        counts = [self.random.choice([1, 1, 2, 3]) for _ in range(self.random.choice([2, 3]))]
        width = piece * sum(counts)
        shape = [5, width, 16] if axis == 1 else [5, 16, width]
        source = self.random.choice(["x", "Tanh(x)", "Transpose<perm=[1,0,2]>(z)"])
        value = source if source == "x" else self.node(source)
        parts, start = [], 0
        for count in counts:
            end = start + count * piece
            parts.append(self.changed(self.cut(value, start, end, axis), count * piece, axis))
            start = end
        self.random.shuffle(parts)
        joined = self.node(f"Concat<axis={axis}>({', '.join(parts)})")
        result = self.node(self.random.choice([f"Neg({joined})", f"Add({joined}, {value})", f"Mul(y, {joined})"]))
        return self.graph(shape, result)


@pytest.mark.parametrize("seed", range(60))
def test_generated_parts_are_computed_alike(seed: int) -> None:
    text = PartsMaker(seed).text()
    plain = onnx.parser.parse_model(HEADER + text)
    with np.errstate(all="ignore"):
        assert_fused_alike(plain, fused(text), inputs_of(plain, seed), 1e-5)


def test_most_generated_parts_are_one_kernel() -> None:
    models = [fused(PartsMaker(seed).text()) for seed in range(60)]
    assert sum(len(list(model.graph)) == 1 for model in models) >= 20


def test_a_concatenation_of_many_small_pieces_stays() -> None:
    model = fused(
        """g (float[16,7] a, float[16,17] b) => (float[16,24] y) {
        n = Neg(a)
        m = Neg(b)
        y = Concat<axis=1>(n, m)
        }"""
    )
    assert "Concat" in [node.op_type for node in model.graph]
