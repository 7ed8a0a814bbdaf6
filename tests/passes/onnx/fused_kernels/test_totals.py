"""Tests of fusing arithmetic on row sums into the kernel that computes the sums."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from generated_graphs import inputs_of
from test_fuse_kernels import HEADER, assert_same, fused, with_kernels

from ort_dynamo.graph.fused_op import DOMAIN
from ort_dynamo.passes.onnx.fuse_kernels import fused_kernels
from ort_dynamo.passes.onnx.fused_kernels.kernel import Total

STATISTICS = """g (bfloat16[ROWS,COLUMNS] x, float[COLUMNS] w, float[COLUMNS] old)
  => (bfloat16[ROWS,COLUMNS] y, float[COLUMNS] mean, float[COLUMNS] scale, float[COLUMNS] new)
  <int64[1] zero = {0}, float part = {0.03}, float eps = {0.001}, float kept = {0.9}> {
  wide = Cast<to=1>(x)
  squares = Mul(wide, wide)
  s1 = ReduceSum<keepdims=0>(wide, zero)
  s2 = ReduceSum<keepdims=0>(squares, zero)
  mean = Mul(s1, part)
  m2 = Mul(s2, part)
  mm = Mul(mean, mean)
  variance = Sub(m2, mm)
  positive = Relu(variance)
  safe = Add(positive, eps)
  root = Sqrt(safe)
  scale = Div(w, root)
  left = Mul(old, kept)
  new = Add(left, mean)
  less = Sub(wide, mean)
  scaled = Mul(less, scale)
  y = Cast<to=16>(scaled)
}"""
"""A batch norm: two sums, numbers of the columns, and the rows that they scale."""


def statistics(rows: int | str, columns: int) -> onnx.ModelProto:
    text = STATISTICS.replace("ROWS", str(rows)).replace("COLUMNS", str(columns))
    return onnx.parser.parse_model(HEADER + text)


def totals(model: ir.Model) -> list[int]:
    """Count the totals of each kernel that has any."""
    counts = (sum(isinstance(step, Total) for step in kernel.steps) for kernel in fused_kernels(model).values())
    return sorted(count for count in counts if count)


def assert_computes_the_same(plain: onnx.ModelProto, model: ir.Model, rows: int = 5) -> None:
    inputs = inputs_of(plain, 0, {"N": rows})
    expected = with_kernels(ir.from_proto(plain), inputs, body=True)
    for body in (False, True):
        found = with_kernels(model, inputs, body=body)
        for name, value in expected.items():
            error = 2e-2 if value.dtype.name == "bfloat16" else 1e-4
            assert_same({name: found[name]}, {name: value}, error)


@pytest.mark.parametrize(
    ("rows", "columns", "kernels"),
    [
        *((24, 40, 2), (4096, 96, 3), (4096, 64, 3), (64, 64, 2), (4096, 100, 3), (2048, 16, 3)),
        *((131, 40, 3), (4099, 96, 3), ("N", 64, 3), ("N", 40, 3)),
    ],
)
def test_statistics_are_part_of_the_kernel_that_adds_up(rows: int | str, columns: int, kernels: int) -> None:
    """Few rows are added and normalized by two kernels; many need one more, which adds up the parts."""
    plain = statistics(rows, columns)
    model = fused(plain)
    assert Counter(node.domain for node in model.graph) == {DOMAIN: kernels}
    assert totals(model) == [2]
    for number in (1, 63, 64, 65, 300) if rows == "N" else (0,):
        assert_computes_the_same(plain, model, number)


def test_a_norm_of_rows_whose_number_varies_and_its_sums_are_one_kernel() -> None:
    text = """g (float[N,M,48] x) => (float[N,M,48] y, float[48] s) <int64[2] rows = {0, 1}> {
      y = Softmax<axis=-1>(x)
      s = ReduceSum<keepdims=0>(y, rows)
    }"""
    plain = onnx.parser.parse_model(HEADER + text)
    model = fused(plain)
    assert [node.domain for node in model.graph] == [DOMAIN, DOMAIN]
    for number in (1, 3, 600):
        assert_computes_the_same(plain, model, number)


def test_a_sum_that_is_a_result_as_well() -> None:
    plain = onnx.parser.parse_model(
        HEADER
        + """g (float[32,48] x, float[48] w) => (float[48] s, float[48] y) <int64[1] zero = {0}> {
      e = Exp(x)
      s = ReduceSum<keepdims=0>(e, zero)
      t = Mul(s, w)
      y = Tanh(t)
    }"""
    )
    model = fused(plain)
    assert len(list(model.graph)) == 1
    assert_computes_the_same(plain, model)


def test_rows_that_read_a_sum_are_another_kernel() -> None:
    plain = onnx.parser.parse_model(
        HEADER
        + """g (float[32,48] x) => (float[32,48] y) <int64[1] zero = {0}> {
      e = Exp(x)
      s = ReduceSum<keepdims=0>(e, zero)
      y = Div(e, s)
    }"""
    )
    model = fused(plain)
    assert not totals(model)
    assert_computes_the_same(plain, model)


def test_sums_of_a_sums_rows_stay_apart() -> None:
    plain = onnx.parser.parse_model(
        HEADER
        + """g (float[2,16,48] x) => (float[48] y) <int64[1] zero = {0}> {
      e = Exp(x)
      s = ReduceSum<keepdims=0>(e, zero)
      t = Mul(s, s)
      y = ReduceSum<keepdims=0>(t, zero)
    }"""
    )
    assert_computes_the_same(plain, fused(plain))


def generated(seed: int) -> onnx.ModelProto | None:
    """Sums of functions of a tensor, arithmetic of them in any order, and rows that read some of it."""
    random = np.random.default_rng(seed)
    rows, columns = int(random.choice([6, 64, 100, 128, 1021, 1024, 4096])), int(random.choice([2, 24, 64, 100, 128]))
    unary, binary = ("Neg", "Abs", "Relu"), ("Add", "Sub", "Max")
    lines: list[str] = []
    wide, narrow = ["x"], ["w"]

    def add(target: list[str], op: str, *given: str) -> None:
        lines.append(f"v{len(lines)} = {op}({', '.join(given)})")
        target.append(f"v{len(lines) - 1}")

    def one(of: tuple[str, ...] | list[str]) -> str:
        return str(random.choice(of))

    for kind in random.integers(5, size=random.integers(6, 16)):
        if kind == 0:
            add(wide, one(unary), one(wide))
        elif kind == 1:
            add(wide, one(binary), one(wide), one(narrow))
        elif kind == 2:
            add(narrow, "ReduceSum<keepdims=0>", one(wide), "zero")
            add(narrow, "Mul", narrow[-1], "part")
        elif kind == 3:
            add(narrow, one(unary), one(narrow))
        else:
            add(narrow, one(binary), one(narrow), one(narrow))
    shape = f"float[{'N' if seed % 3 == 0 else rows},{columns}]"
    results = [
        *(f"{shape} {name}" for name in wide[1:][-1:]),
        *(f"float[{columns}] {name}" for name in narrow[1:][-3:]),
    ]
    if not results:
        return None
    head = f"g ({shape} x, float[{columns}] w) => ({', '.join(results)})"
    numbers = f"<int64[1] zero = {{0}}, float part = {{{1 / rows}}}>"
    return onnx.parser.parse_model(f"{HEADER}{head} {numbers} {{ {' '.join(lines)} }}")


@pytest.mark.parametrize("seed", range(40))
def test_generated_statistics(seed: int) -> None:
    if (plain := generated(seed)) is not None:
        model = fused(plain)
        for rows in (1, 200) if seed % 3 == 0 else (0,):
            assert_computes_the_same(plain, model, rows)


@pytest.mark.parametrize("opset", [13, 15])
@pytest.mark.parametrize("rows", [131, "N"])
def test_sums_of_unequal_parts_are_valid_in_older_opsets(rows: int | str, opset: int) -> None:
    text = f"""g (float[{rows}, 40] x) => (float[{rows}, 40] y, float[40] total) <int64[1] zero = {{0}}> {{
      y = Exp(x)  total = ReduceSum<keepdims=0>(y, zero)
    }}"""
    plain = onnx.parser.parse_model(HEADER.replace('"" : 20', f'"" : {opset}') + text)
    model = fused(plain)
    assert {node.domain for node in model.graph} == {DOMAIN}
    assert_computes_the_same(plain, model, 131)


def test_generated_statistics_have_totals() -> None:
    models = [fused(plain) for seed in range(40) if (plain := generated(seed)) is not None]
    assert sum(bool(totals(model)) for model in models) > 10
