"""Graph before, graph after; and the same bits from ONNX Runtime's kernels."""

from __future__ import annotations

import logging

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import pytest

from ort_dynamo.passes.onnx.expand_short_runs import ExpandShortRuns
from ort_dynamo.runtime.installed.importing import onnxruntime
from ort_dynamo.testing import assert_rewrites

HEADER = '<ir_version: 10, opset_import: ["" : 20]>\n'
SPECIAL = np.array([0.0, -0.0, 1.5, -2.25, np.inf, -np.inf, np.nan, 1e-40, 3e38])


def test_an_operand_that_repeats_over_the_last_dimension_is_copied_and_transposed() -> None:
    assert_rewrites(
        ExpandShortRuns(),
        f"{HEADER} g (float[N, 512, 3] x, float[N, 512, 1] r) => (float[N, 512, 3] y) {{ y = Div (x, r) }}",
        f"""{HEADER} g (float[N, 512, 3] x, float[N, 512, 1] r) => (float[N, 512, 3] y)
        <int64[2] shape_0x0 = {{0, 0}}, int64[3] shape_3x1x1 = {{3, 1, 1}}> {{
            r_reshape = Reshape (r, shape_0x0)
            r_expand = Expand (r_reshape, shape_3x1x1)
            r_transpose = Transpose <perm: ints = [1, 2, 0]> (r_expand)
            y = Div (x, r_transpose)
        }}""",
    )


def test_an_operand_that_repeats_further_out_is_expanded_where_it_is_until_its_runs_are_long() -> None:
    assert_rewrites(
        ExpandShortRuns(),
        f"{HEADER} g (float[N, 64, 8, 4] x, float[4] b) => (float[N, 64, 8, 4] y) {{ y = Add (x, b) }}",
        f"""{HEADER} g (float[N, 64, 8, 4] x, float[4] b) => (float[N, 64, 8, 4] y) <int64[2] shape_8x1 = {{8, 1}}> {{
            b_expand = Expand (b, shape_8x1)
            y = Add (x, b_expand)
        }}""",
    )


def test_an_operand_that_repeats_at_both_places_is_expanded_at_both() -> None:
    before = (
        f"{HEADER} g (float[512, 1, 3, 1] x, float[512, 8, 3, 2] z) => (float[512, 8, 3, 2] y) {{ y = Mul (x, z) }}"
    )
    assert_rewrites(
        ExpandShortRuns(),
        before,
        f"""{HEADER} g (float[512, 1, 3, 1] x, float[512, 8, 3, 2] z) => (float[512, 8, 3, 2] y)
        <int64[3] shape_0x0x0 = {{0, 0, 0}}, int64[4] shape_2x1x1x1 = {{2, 1, 1, 1}},
         int64[3] shape_8x1x1 = {{8, 1, 1}}> {{
            x_reshape = Reshape (x, shape_0x0x0)
            x_expand = Expand (x_reshape, shape_2x1x1x1)
            x_transpose = Transpose <perm: ints = [1, 2, 3, 0]> (x_expand)
            x_expand_2 = Expand (x_transpose, shape_8x1x1)
            y = Mul (x_expand_2, z)
        }}""",
    )


def test_several_last_dimensions_are_copied_as_one() -> None:
    text = f"{HEADER} g (float[N, 1, 1] x, float[N, 3, 2] z) => (float[N, 3, 2] y) {{ y = Sub (x, z) }}"
    assert_rewrites(
        ExpandShortRuns(least=16),
        text,
        f"""{HEADER} g (float[N, 1, 1] x, float[N, 3, 2] z) => (float[N, 3, 2] y)
        <int64[1] shape_0 = {{0}}, int64[2] shape_6x1 = {{6, 1}}, int64[3] shape_0x3x2 = {{0, 3, 2}}> {{
            x_reshape = Reshape (x, shape_0)
            x_expand = Expand (x_reshape, shape_6x1)
            x_transpose = Transpose <perm: ints = [1, 0]> (x_expand)
            x_reshape_2 = Reshape (x_transpose, shape_0x3x2)
            y = Sub (x_reshape_2, z)
        }}""",
    )


def test_an_expanded_operand_is_shared() -> None:
    model = ir.from_onnx_text(
        f"""{HEADER}
g (float[64, 100, 1, 2] a, float[64, 1, 100, 2] b) => (float[64, 100, 100, 2] y, bool[64, 100, 100, 2] z) {{
    y = Max (a, b)
    z = Less (b, a)
}}
"""
    )
    assert ExpandShortRuns()(model).modified
    assert [node.op_type for node in model.graph] == ["Expand", "Max", "Less"]  # runs of b have 200 elements


@pytest.mark.parametrize(
    ("scalar", "constant"), [("s", "float s = {2}"), ("s", "float[1] s = {2}"), ("s", ""), ("one", "")]
)
def test_a_scalar_gets_the_rank_of_a_result_that_ends_in_1(scalar: str, constant: str) -> None:
    inputs = "float[4000, 1, 1] x, float one" + ("" if constant else ", float[1, 1] s")
    constants = f"<{constant}>" if constant else ""
    model = ir.from_onnx_text(f"{HEADER} g ({inputs}) => (float[4000, 1, 1] y) {constants} {{ y = Mul (x, {scalar}) }}")
    assert ExpandShortRuns()(model).modified
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    operand = next(node for node in model.graph if node.op_type == "Mul").inputs[1]
    assert operand is not None
    assert operand.shape == ir.Shape([1, 1, 1])
    assert (operand.const_value is not None) == bool(constant)
    assert not ExpandShortRuns()(model).modified


@pytest.mark.parametrize(
    ("inputs", "result", "operator"),
    [
        ("float[4096, 13] x, float[4096, 1] z", "float[4096, 13]", "Add"),  # long runs
        ("float[64, 3] x, float[64, 1] z", "float[64, 3]", "Add"),  # few of them
        ("float[4096, 3] x, float[4096, 3] z", "float[4096, 3]", "Add"),
        ("float[4096, 3] x, float z", "float[4096, 3]", "Add"),
        ("float[4096, 3] x, float[1, 1] z", "float[4096, 3]", "Add"),
        ("float[4096, 1] x, float[1, 1] z", "float[4096, 1]", "Add"),
        ("float[1000, 1] x, float z", "float[1000, 1]", "Add"),
        ("float[4096, 3] x, float[4096, 1] z", "float[4096, 3]", "Pow"),
        ("float[4096, N] x, float[4096, 1] z", "float[4096, N]", "Add"),
        ("float[4096, M] x, float[4096, N] z", "float[4096, K]", "Add"),
        ("float[N, 4096, 3] x, float[1, 3] z", "", "Add"),
        ("float16[4096, 3] x, float16[4096, 1] z", "float16[4096, 3]", "Add"),
        ("float[0, 4096, 3] x, float[0, 4096, 1] z", "float[0, 4096, 3]", "Add"),
        ("float[4096, 3, 0] x, float[4096, 1, 1] z", "float[4096, 3, 0]", "Add"),
        ("float[1, 0, 17] x, float[N, 0, 17] z", "float[N, 0, 17]", "Add"),
        ("double[4096, 7] x, double[4096, 1] z", "double[4096, 7]", "Add"),  # long, of eight bytes
    ],
)
def test_other_operands_stay(inputs: str, result: str, operator: str) -> None:
    if not result:
        result, inputs = "float[N, 4096, 3]", inputs.replace("[1, 3]", "[N, 4096, 3]")
    text = f"{HEADER} g ({inputs}) => ({result} y) {{ y = {operator} (x, z) }}"
    assert_rewrites(ExpandShortRuns(), text, text)


def test_more_threads_expand_shorter_runs() -> None:
    assert [ExpandShortRuns.of(threads).longest for threads in (1, 2, 4, 48)] == [12, 12, 6, 0]


@pytest.mark.parametrize(("rows", "changes"), [(65536, True), (65537, False)])
def test_a_constant_is_expanded_where_it_stays_small(rows: int, changes: bool) -> None:
    text = f"{HEADER} g (float[{rows}, 4] x) => (float[{rows}, 4] y) <float[4] b = {{1, 2, 3, 4}}> {{ y = Add (x, b) }}"
    assert ExpandShortRuns()(ir.from_onnx_text(text)).modified == changes


def test_old_opsets_stay() -> None:
    text = '<ir_version: 3, opset_import: ["" : 8]> g (float[4096, 3] x, float[4096, 1] z) => (float[4096, 3] y)'
    assert not ExpandShortRuns()(ir.from_onnx_text(text + " { y = Add (x, z) }")).modified


def test_an_operand_that_is_left_says_why(caplog: pytest.LogCaptureFixture) -> None:
    text = f"{HEADER} g (float[512, N, 3] x, float[512, 1, 3] z) => (float[512, N, 3] y) {{ y = Add (x, z) }}"
    with caplog.at_level(logging.DEBUG, "ort_dynamo"):
        assert_rewrites(ExpandShortRuns(), text, text)
    assert "ExpandShortRuns leaves y (Add): z repeats over a dimension of unknown size" in caplog.text


ARITHMETIC = ["Add", "Div", "Max", "Min", "Mul", "Sub"]
COMPARISONS = ["Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"]
LOGIC = ["And", "Or", "Xor"]
NUMBERS = {"float": np.float32, "double": np.float64, "int32": np.int32, "int64": np.int64, "bool": np.bool_}


@pytest.mark.parametrize("operator", [*ARITHMETIC, *COMPARISONS, *LOGIC, "Where"])
@pytest.mark.parametrize("seed", range(6))
def test_random_broadcasts_keep_every_bit(operator: str, seed: int) -> None:
    random = np.random.default_rng([seed, *operator.encode()])
    kind = "bool" if operator in LOGIC else random.choice(["float", "double", "int32", "int64"])
    result = "bool" if operator in COMPARISONS else kind
    sizes = [int(size) for size in random.choice([1, 2, 3, 5, 9], random.integers(1, 5))]
    symbols = random.integers(4, size=len(sizes)) == 0
    given, inputs = {}, []
    for name in ("c", "x", "z") if operator == "Where" else ("x", "z"):
        type_ = "bool" if name == "c" else kind
        shape = [size if random.integers(3) else 1 for size in sizes][int(random.integers(len(sizes) + 1)) :]
        given[name] = numbers(random, type_, shape)
        inputs.append(f"{type_}{declared(shape, symbols)} {name}")
    whole = list(np.broadcast_shapes(*(value.shape for value in given.values())))
    model = ir.from_onnx_text(
        f"""{HEADER} g ({", ".join(inputs)}) => ({result}{declared(whole, symbols)} y) {{
            y = {operator} ({", ".join(given)})
        }}"""
    )
    expected = run(model, given)
    ExpandShortRuns(longest=4, least=1)(model)
    found = run(model, given)
    if operator in ("Max", "Min"):  # of two zeros, the kernels take the one or the other
        found, expected = found + 0, expected + 0
    np.testing.assert_equal(found.view(np.uint8), expected.view(np.uint8))


def declared(shape: list[int], symbols: npt.NDArray[np.bool_]) -> str:
    """The shape as ONNX's text has it, where sizes above 1 of some axes have a name."""
    axes = range(len(symbols) - len(shape), len(symbols))
    named = [f"N{axis}" if size > 1 and symbols[axis] else str(size) for axis, size in zip(axes, shape, strict=True)]
    return f"[{', '.join(named)}]" if named else ""


def numbers(random: np.random.Generator, kind: str, shape: list[int]) -> npt.NDArray[np.generic]:
    if kind in ("float", "double"):
        return random.choice(SPECIAL, shape).astype(NUMBERS[kind])
    low, high = (0, 2) if kind == "bool" else (1, 9)
    return np.asarray(random.integers(low, high, shape), NUMBERS[kind])


def run(model: ir.Model, given: dict[str, npt.NDArray[np.generic]]) -> npt.NDArray[np.generic]:
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    session = onnxruntime().InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    (result,) = session.run(None, given)
    return np.atleast_1d(result)
