"""Slices with a step and single entries become parts of kernels, such as rotary embeddings of neighbouring columns."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest
from generated_graphs import TextMaker, inputs_of
from test_fuse_kernels import HEADER, assert_fused_alike, fused

from ort_dynamo.graph.fused_op import DOMAIN, Size
from ort_dynamo.passes.onnx.fused_kernels.layouts import is_in_runs

BOUNDS = "<int64[1] zero = {0}, int64[1] one = {1}, int64[1] two = {2}, int64[1] all = {16}, int64[1] last = {3}>"

ROTATED = f"""g (float[2,16,4,16] x, float[16,16] cosine, float[16,16] sine) => (float[2,4,16,16] y) {BOUNDS} {{
  t = Transpose<perm=[0,2,1,3]>(x)
  odd = Slice(t, one, all, last, two)
  n = Neg(odd)
  even = Slice(t, zero, all, last, two)
  u = Unsqueeze(n, four)
  v = Unsqueeze(even, four)
  pairs = Concat<axis=4>(u, v)
  turned = Reshape(pairs, shape)
  a = Mul(t, cosine)
  b = Mul(turned, sine)
  y = Add(a, b)
}}""".replace("> {", ", int64[1] four = {4}, int64[4] shape = {2, 4, 16, 16}> {", 1)

GRADIENT = """g (float[N,4,16,16] g, float[16,16] cosine, float[16,16] sine) => (float[N,16,4,16] y)
  <int64[1] four = {4}, int64 first = {0}, int64 second = {-1}, int64[5] pairs = {0, 4, 16, 8, 2},
   int64[4] shape = {0, 4, 16, 16}> {
  a = Mul(g, cosine)
  b = Mul(g, sine)
  p = Reshape(b, pairs)
  q = Gather<axis=4>(p, first)
  r = Gather<axis=-1>(p, second)
  n = Neg(q)
  u = Unsqueeze(r, four)
  v = Unsqueeze(n, four)
  joined = Concat<axis=4>(u, v)
  turned = Reshape(joined, shape)
  c = Add(a, turned)
  y = Transpose<perm=[0,2,1,3]>(c)
}"""


@pytest.mark.parametrize("text", [ROTATED, GRADIENT], ids=["forward", "gradient"])
def test_a_rotary_embedding_of_neighbouring_columns_is_one_kernel(text: str) -> None:
    model = fused(text)
    assert [node.domain for node in model.graph] == [DOMAIN]
    plain = onnx.parser.parse_model(HEADER + text)
    assert_fused_alike(plain, model, inputs_of(plain, 0), 1e-5)


class EntriesMaker(TextMaker):
    """Makes a graph of a seed that reads every few entries of an axis, computes with them, and joins them."""

    def scalar(self, number: int) -> str:
        name = f"s{number}".replace("-", "m")
        self.constants[f"int64 {name}"] = str(number)
        return name

    def entries(self, value: str, shape: list[int], axis: int, first: int, step: int) -> str:
        """The entries first, first + step, … of an axis, which has a whole number of steps."""
        if self.random.random() < 0.5:
            start = first - shape[axis] if self.random.random() < 0.3 else first
            bounds = [self.constant(number) for number in (start, 1 << 40, axis, step)]
            return self.node(f"Slice({value}, {', '.join(bounds)})")
        split = [*shape[:axis], shape[axis] // step, step, *shape[axis + 1 :]]
        index = self.scalar(first - step if self.random.random() < 0.3 else first)
        return self.node(f"Gather<axis={axis + 1}>({self.node(f'Reshape({value}, {self.constant(*split)})')}, {index})")

    def text(self) -> str:
        axis, step = self.random.choice([1, 2]), self.random.choice([2, 2, 2, 3, 4])
        shape = [5, 24, 16] if axis == 1 else [5, 16, 24]
        source = self.random.choice(["x", "Tanh(x)", "Transpose<perm=[1,0,2]>(z)"])
        value = source if source == "x" else self.node(source)
        parts = [self.entries(value, shape, axis, first, step) for first in range(step)]
        changed = [self.node(f"{self.random.choice(['Neg', 'Tanh', 'Identity'])}({part})") for part in parts]
        self.random.shuffle(changed)
        columns = [self.node(f"Unsqueeze({part}, {self.constant(axis + 1)})") for part in changed]
        stacked = self.node(f"Concat<axis={axis + 1}>({', '.join(columns)})")
        joined = self.node(f"Reshape({stacked}, {self.constant(*shape)})")
        result = self.node(self.random.choice([f"Neg({joined})", f"Add({joined}, {value})", f"Mul(y, {joined})"]))
        return self.graph(shape, result)


@pytest.mark.parametrize("seed", range(60))
def test_generated_entries_are_computed_alike(seed: int) -> None:
    text = EntriesMaker(seed).text()
    plain = onnx.parser.parse_model(HEADER + text)
    with np.errstate(all="ignore"):
        assert_fused_alike(plain, fused(text), inputs_of(plain, seed), 1e-5)


def test_most_generated_entries_are_one_kernel() -> None:
    models = [fused(EntriesMaker(seed).text()) for seed in range(60)]
    assert sum(len(list(model.graph)) == 1 for model in models) >= 40


@pytest.mark.parametrize(
    ("start", "end", "step"),
    [(2, 12, 2), (0, 9, 2), (11, -13, -1), (0, 12, 5), (1, 12, 12), (5, 12, 6)],
    ids=str,
)
def test_a_slice_with_any_step_is_computed_alike(start: int, end: int, step: int) -> None:
    width = len(range(12)[start : None if end < -12 else end : step])
    text = f"""g (float[5,12] x, float[5,{width}] z) => (float[5,{width}] y)
      <int64[1] s = {{{start}}}, int64[1] e = {{{end}}}, int64[1] one = {{1}}, int64[1] step = {{{step}}}> {{
        a = Slice(x, s, e, one, step)  b = Exp(a)  y = Mul(b, z) }}"""
    plain = onnx.parser.parse_model(HEADER + text)
    assert_fused_alike(plain, fused(text), inputs_of(plain, 0), 1e-6)


def test_a_slice_of_all_axes_has_no_step() -> None:
    text = """g (float[5,12] x) => (float[2,4] y) <int64[2] s = {3, 4}, int64[2] e = {5, 8}> {
        a = Exp(x)  b = Slice(a, s, e)  y = Neg(b) }"""
    plain = onnx.parser.parse_model(HEADER + text)
    assert_fused_alike(plain, fused(text), inputs_of(plain, 0), 1e-6)


@pytest.mark.parametrize("index", [[0], [1, 0], [[0, 1]]], ids=str)
def test_a_gather_of_a_list_is_computed_alike(index: list[object]) -> None:
    numbers = np.array(index, dtype=np.int64)
    shape = [5, *numbers.shape, 6]
    text = f"""g (float[5,2,6] x) => (float[{",".join(map(str, shape))}] y)
      <int64[{",".join(map(str, numbers.shape))}] i = {{{",".join(map(str, numbers.reshape(-1)))}}}> {{
        a = Exp(x)  b = Gather<axis=1>(a, i)  y = Neg(b) }}"""
    plain = onnx.parser.parse_model(HEADER + text)
    assert_fused_alike(plain, fused(text), inputs_of(plain, 0), 1e-6)


@pytest.mark.parametrize(
    ("strides", "expected"),
    [
        *(((16, 1), True), ((32, 2), True), ((100, 2), True), ((48, 3), False), ((1, 64), False), ((2, 128), False)),
        *(((7, 0), True), ((0, 2), True)),
    ],
)
def test_neighbouring_points_read_neighbours_or_every_second_element(strides: tuple[int, int], expected: bool) -> None:
    assert is_in_runs((Size(64), Size(16)), tuple(map(Size, strides))) == expected


def test_a_short_run_of_every_second_element_is_no_run() -> None:
    assert is_in_runs((Size(64), Size(8)), (Size(100), Size(2)))
    assert not is_in_runs((Size(64), Size(4)), (Size(100), Size(2)))
