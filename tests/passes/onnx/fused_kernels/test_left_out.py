"""Tests of nodes that no kernel can compute right: they stay nodes, beside kernels of their neighbours."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from test_fuse_kernels import HEADER, assert_same, fused, run, with_kernels

from ort_dynamo.graph.fused_op import DOMAIN, Size
from ort_dynamo.passes.onnx.analysis.value_types import infer_missing_types
from ort_dynamo.passes.onnx.fused_kernels.layouts import CannotFuseError
from ort_dynamo.passes.onnx.fused_kernels.pieces import part_of


def assert_computes_the_same(text: str, inputs: dict[str, np.ndarray]) -> list[str]:
    """Compare the fused model with the plain one; gives the operators that are left, and those that are fused."""
    plain = onnx.parser.parse_model(HEADER + text)
    model = fused(text)
    assert_same(with_kernels(model, inputs, body=False), run(plain, inputs), 1e-6)
    return [node.op_type for node in model.graph if node.domain != DOMAIN]


def part(text: str) -> tuple[int, int] | None:
    """The axis and the first column of the part b of x, which has 12 columns; None if it is not known."""
    model = ir.from_proto(onnx.parser.parse_model(HEADER + f"g (float[5,12] x) => (float y) {{ {text} y = Exp(b) }}"))
    infer_missing_types(model, shapes=True)
    (node,) = (node for node in model.graph if node.op_type in ("Split", "Slice"))
    (value,) = (value for value in node.outputs if value.name == "b")
    assert value.shape is not None
    width = value.shape[1]
    assert isinstance(width, int)
    try:
        return part_of(node, value, (Size(5), Size(12)), (Size(5), Size(width)))
    except CannotFuseError:
        return None


@pytest.mark.parametrize(
    ("sizes", "found"),
    [((4, 4, 4), (1, 4)), ((2, 4, 6), None), ((6, 4, 2), None), ((4, 4, 2, 2), None)],  # 4 is a third of 12
)
def test_a_piece_of_a_split_is_read_by_its_index_if_all_are_equal(
    sizes: tuple[int, ...], found: tuple[int, int] | None
) -> None:
    names = ", ".join("abcd"[: len(sizes)])
    constant = f"sizes = Constant <value_ints = [{', '.join(map(str, sizes))}]> ()"
    assert part(f"{constant} {names} = Split <axis = 1> (x, sizes)") == found
    assert part(f"{constant} {names} = Split <axis = -1> (x, sizes)") == found


@pytest.mark.parametrize(
    ("start", "end", "found"),
    [
        *((0, 4, (1, 0)), (4, 8, (1, 4)), (8, 12, (1, 8)), (-8, 8, (1, 4)), (4, -4, (1, 4)), (-4, 99, (1, 8))),
        *((-99, 4, (1, 0)), (8, 99, (1, 8)), (0, 12, (1, 0)), (3, 7, (1, 3)), (-7, 12, (1, 5)), (12, 12, None)),
    ],
)
def test_a_slice_begins_at_its_first_column(start: int, end: int, found: tuple[int, int] | None) -> None:
    constants = f"s = Constant <value_ints = [{start}]> () e = Constant <value_ints = [{end}]> ()"
    for axis in (1, -1):
        axes = f"axis = Constant <value_ints = [{axis}]> ()"
        assert part(f"{constants} {axes} b = Slice(x, s, e, axis)") == found


@pytest.mark.parametrize(("start", "end"), [(2, 6), (3, 7), (0, 5), (5, 10), (4, 12)])
def test_a_slice_that_is_no_equal_piece_stays_beside_a_kernel(start: int, end: int) -> None:
    text = f"""g (float[5,12] x) => (float[5,{end - start}] y)
      <int64[1] s = {{{start}}}, int64[1] e = {{{end}}}, int64[1] one = {{1}}> {{
        a = Slice(x, s, e, one)  b = Exp(a)  y = Neg(b) }}"""
    x = np.random.default_rng(0).normal(size=(5, 12)).astype(np.float32)
    assert assert_computes_the_same(text, {"x": x}) == ["Slice"]


def test_a_slice_of_several_axes_is_no_part() -> None:
    constants = "s = Constant <value_ints = [4]> () axis = Constant <value_ints = [1]> ()"
    e, step = "e = Constant <value_ints = [8]> ()", "step = Constant <value_ints = [1]> ()"
    assert part(f"{constants} {e} {step} b = Slice(x, s, e, axis, step)") == (1, 4)
    two = "s = Constant <value_ints = [0, 4]> () e = Constant <value_ints = [5, 8]> ()"
    assert part(f"{two} axis = Constant <value_ints = [0, 1]> () b = Slice(x, s, e, axis)") is None


@pytest.mark.parametrize(
    ("source", "target", "left"),
    [
        ("float", "int32", ["Cast"]),
        ("float", "int64", ["Cast"]),
        ("int64", "int32", []),
        ("bool", "int32", []),
        ("int32", "float", []),
    ],
)
def test_a_cast_of_floats_to_integers_stays(source: str, target: str, left: list[str]) -> None:
    # Devices convert a float that no integer holds in ways of their own.
    number = onnx.TensorProto.DataType.Value("FLOAT" if target == "float" else target.upper())
    text = f"""g ({source}[5,7] x) => ({target}[5,7] y) {{
        a = Cast <to = {number}> (x)  b = Add(a, a)  y = Mul(b, a)
    }}"""
    x = np.arange(-10, 25).reshape(5, 7)
    given = x > 3 if source == "bool" else x.astype({"float": np.float32}.get(source, source))
    assert assert_computes_the_same(text, {"x": given}) == left


@pytest.mark.parametrize(
    "node",
    [
        "a = Gelu(x)",
        'a = Gelu <approximate = "tanh"> (x)',
        "a = com.microsoft.Gelu(x)",
        "a = com.microsoft.QuickGelu(x)",
        "a = com.microsoft.QuickGelu <alpha = 0.5> (x)",
        "a = com.microsoft.FastGelu(x)",
        "a = com.microsoft.FastGelu(x, b)",
        "a = com.microsoft.BiasGelu(x, b)",
        "a = LeakyRelu(x)",
        "a = LeakyRelu <alpha = 0.3> (x)",
    ],
)
def test_an_activation_with_its_attributes_and_bias_is_computed_the_same(node: str) -> None:
    text = f"g (float[5,12] x, float[12] b) => (float[5,12] y) {{ {node} c = Mul(a, x) y = Add(c, b) }}"
    maker = np.random.default_rng(0)
    inputs = {name: maker.standard_normal(size, np.float32) * 2 for name, size in (("x", (5, 12)), ("b", 12))}
    assert assert_computes_the_same(text, inputs) == []


@pytest.mark.parametrize(
    ("dtype", "axis", "fuses"),
    [
        *((dtype, -1, True) for dtype in ("float", "double", "float16")),
        *((dtype, 0, dtype != "float16") for dtype in ("float", "double", "float16")),
        *((dtype, axis, False) for dtype in ("int32", "int64") for axis in (0, -1)),
    ],
)
def test_sums_of_floats_are_fused_and_those_over_rows_if_they_are_not_narrow(
    dtype: str, axis: int, fuses: bool
) -> None:
    size = 12 if axis == 0 else 5
    text = f"""g ({dtype}[5,12] x) => ({dtype}[{size}] y) <int64[1] axis = {{{axis}}}> {{
        a = Mul(x, x)
        y = ReduceSum<keepdims=0>(a, axis)
    }}"""
    x = (
        np.random.default_rng(0)
        .integers(-4, 4, (5, 12))
        .astype({"float": "float32", "double": "float64"}.get(dtype, dtype))
    )
    assert assert_computes_the_same(text, {"x": x}) == ([] if fuses else ["Mul", "ReduceSum"])
