"""Tests of nodes without a kernel in CUDA's provider: each becomes a kernel of ours, alone if need be."""

from __future__ import annotations

import random

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from kernel_resources import resources
from onnx_ir.passes.common import RemoveUnusedNodesPass
from test_fuse_kernels import HEADER, fused, interpreted, with_kernels

from ort_dynamo.graph.fused_op import DOMAIN
from ort_dynamo.passes.onnx.fuse_kernels import fused_ops, lacks_kernel
from ort_dynamo.runtime.kernels.fused_kernel import CompiledKernel
from ort_dynamo.runtime.kernels.kernel_compiler import compile_kernels, triton_version
from ort_dynamo.targets.target import OWN_KERNELS

DTYPES = {"int32": np.int32, "int64": np.int64}
REFERENCE = {"BitwiseAnd": np.bitwise_and, "BitwiseOr": np.bitwise_or, "BitwiseXor": np.bitwise_xor}
needs_triton = pytest.mark.skipif(triton_version() is None, reason="there is no Triton")


def numbers(shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    """Integers of all sizes, the extremes among them."""
    least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
    found = np.random.default_rng(seed).integers(least, most, shape, dtype, endpoint=True)
    found.reshape(-1)[:2] = [least, most][: found.size]
    return found


SHAPES = [
    ("[5,37]", "[5,37]", "[5,37]"),
    ("[5,37]", "[37]", "[5,37]"),
    ("[5,1]", "[1,37]", "[5,37]"),
    ("[5,3]", "[3]", "[5,3]"),
    ("[5,37]", "", "[5,37]"),
    ("", "", ""),
    ("[rows,6]", "[rows,6]", "[rows,6]"),
    ("[rows,6]", "[rows,1]", "[rows,6]"),
]
"""The shapes of two operands and of the result."""


def single(op_type: str, dtype: str, first: str, second: str, result: str) -> str:
    return f"g ({dtype}{first} a, {dtype}{second} b) => ({dtype}{result} y) {{ y = {op_type}(a, b) }}"


def arrays(model: ir.Model, seed: int = 0) -> dict[str, np.ndarray]:
    found = {}
    for place, value in enumerate(model.graph.inputs):
        assert value.shape is not None
        assert value.dtype is not None
        shape = tuple(size if isinstance(size, int) else 4 for size in value.shape)
        found[str(value.name)] = numbers(shape, value.dtype.name.lower(), seed + place)
    return found


def assert_equal(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, right in expected.items():
        assert found[name].dtype == right.dtype
        np.testing.assert_array_equal(found[name], right)


def assert_interpreted(model: ir.Model, inputs: dict[str, np.ndarray]) -> int:
    """Compare each fused node by Triton's interpreter with its NumPy form; gives how many there are."""
    seen = 0
    for found, right in interpreted(model, inputs):
        for name, one in found.items():
            np.testing.assert_array_equal(one, right[name])
        seen += 1
    return seen


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op_type", OWN_KERNELS)
def test_one_node_is_a_kernel(op_type: str, dtype: str, shapes: tuple[str, str, str]) -> None:
    model = fused(single(op_type, dtype, *shapes))
    assert [node.domain for node in model.graph] == [DOMAIN]
    inputs = arrays(model)
    expected = {"y": np.asarray(REFERENCE[op_type](inputs["a"], inputs["b"]))}
    assert_equal(with_kernels(model, inputs, body=False), expected)
    assert_equal(with_kernels(model, inputs, body=True), expected)
    if triton_version() is not None:
        assert assert_interpreted(model, inputs) == 1


@pytest.mark.parametrize("number", [3, -1, -(1 << 63), (1 << 63) - 1, ~(1 << 62)])
def test_a_number_is_part_of_the_kernel(number: int) -> None:
    text = f"g (int64[5,37] a) => (int64[5,37] y) <int64 n = {{{number}}}> {{ y = BitwiseXor(a, n) }}"
    model = fused(text)
    (node,) = model.graph
    assert len(node.inputs) == 1
    inputs = arrays(model)
    assert_equal(with_kernels(model, inputs, body=False), {"y": inputs["a"] ^ np.int64(number)})
    assert_equal(with_kernels(model, inputs, body=True), {"y": inputs["a"] ^ np.int64(number)})
    if triton_version() is not None:
        assert assert_interpreted(model, inputs) == 1


CHAIN = """g (int64[5,37] a, int32[5,37] b, int64[37] c) => (int64[5,37] y, bool[5,37] z) <int64 one = {1}> {
  w = Cast<to=7>(b)  s = Add(a, w)  m = BitwiseAnd(s, c)  o = BitwiseOr(m, w)
  odd = BitwiseAnd(o, one)  z = Equal(odd, one)  n = Mul(o, c)  y = Where(z, n, m)
}"""


def test_neighbouring_operators_join_the_kernel() -> None:
    model = fused(CHAIN)
    assert len(list(model.graph)) == 1
    inputs = arrays(model)
    expected = with_kernels(ir.from_proto(onnx.parser.parse_model(HEADER + CHAIN)), inputs, body=True)
    assert_equal(with_kernels(model, inputs, body=False), expected)
    assert_equal(with_kernels(model, inputs, body=True), expected)
    if triton_version() is not None:
        assert assert_interpreted(model, inputs) == 1


def integer_graph(seed: int) -> onnx.ModelProto:
    """A random graph of integers: bits, arithmetic, comparisons, choices, casts, and data movement."""
    draw = random.Random(seed)
    rows, columns = draw.choice([1, 3, 160]), draw.choice([1, 7, 48])
    nodes: list[str] = []
    values = {"a": "int64", "b": "int32", "c": "int64", "d": "int64"}
    whole = ["a", "b"]  # the others are of one row, and one element

    def made(text: str, dtype: str) -> None:
        nodes.append(f"v{len(nodes)} = {text}")
        values[f"v{len(nodes) - 1}"] = dtype
        whole.append(f"v{len(nodes) - 1}")

    while len(nodes) < 14:
        first = draw.choice(whole)
        dtype, kind = values[first], draw.randrange(6)
        second = draw.choice([name for name, other in values.items() if other == dtype])
        if kind < 3:
            made(f"{draw.choice([*OWN_KERNELS, *OWN_KERNELS, 'Add', 'Mul', 'Sub'])}({first}, {second})", dtype)
        elif kind == 3 and dtype == "int64":
            nodes.append(f"t{len(nodes)} = Transpose<perm=[1,0]>({first})")
            nodes.append(f"u{len(nodes)} = Reshape(t{len(nodes) - 1}, shape)")
            made(f"Identity(u{len(nodes) - 1})", dtype)
        elif kind == 4:
            made(f"Cast<to={6 if dtype == 'int64' else 7}>({first})", "int32" if dtype == "int64" else "int64")
        else:
            nodes.append(f"p{len(nodes)} = Less({first}, {second})")
            made(f"Where(p{len(nodes) - 1}, {first}, {second})", dtype)
    last = [name for name in whole if name.startswith("v")][-6:]
    outputs = ", ".join(f"{values[name]}[{rows},{columns}] {name}" for name in last)
    given = f"int64[{rows},{columns}] a, int32[{rows},{columns}] b, int64[{columns}] c, int64[1] d"
    text = f"g ({given}) => ({outputs}) <int64[2] shape = {{{rows}, {columns}}}> {{ {'  '.join(nodes)} }}"
    model = ir.from_proto(onnx.parser.parse_model(HEADER + text))
    RemoveUnusedNodesPass()(model)
    return ir.to_proto(model)


@pytest.mark.parametrize("seed", range(40))
def test_a_generated_graph_computes_the_same(seed: int) -> None:
    plain = integer_graph(seed)
    onnx.checker.check_model(plain, full_check=True)
    model = fused(plain)
    assert not [node.op_type for node in model.graph if node.op_type in OWN_KERNELS], "each of them is a kernel"
    assert lacks_kernel(ir.from_proto(plain)) is None
    inputs = arrays(model, seed)
    with np.errstate(all="ignore"):
        expected = with_kernels(ir.from_proto(plain), inputs, body=True)
        assert_equal(with_kernels(model, inputs, body=False), expected)
        assert_equal(with_kernels(model, inputs, body=True), expected)
        if triton_version() is not None and seed < 12:
            assert assert_interpreted(model, inputs)


def test_generated_graphs_have_such_nodes() -> None:
    counted = [sum(node.op_type in OWN_KERNELS for node in integer_graph(seed).graph.node) for seed in range(40)]
    assert sum(counted) > 120


@needs_triton
def test_they_compile_for_a_device() -> None:
    texts = [CHAIN, *(single(op_type, dtype, *SHAPES[2]) for op_type in OWN_KERNELS for dtype in DTYPES)]
    texts += ["g (int64[9] a) => (int64[9] y) <int64 n = {-9223372036854775808}> { y = BitwiseOr(a, n) }"]
    ops = {op.name: op for text in texts for op in fused_ops(fused(text))}
    for name, found in compile_kernels([*ops.values()], (9, 0)).items():
        assert isinstance(found, CompiledKernel), (name, found)
        assert resources(found.aligned.cubin).local == resources(found.unaligned.cubin).local == 0, name


BRANCH = """g (bool c, int64[4] a) => (int64[4] y) {
  y = If (c) <then_branch = one () => (int64[4] b) { b = BitwiseAnd (a, a) },
              else_branch = other () => (int64[4] d) { d = Identity (a) }>
}"""


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (CHAIN, None),
        ("g (int8[4] a) => (int8[4] y) { y = Add(a, a) }", None),
        ("g (int64[0,3] a) => (int64[0,3] y) { y = BitwiseAnd(a, a) }", "takes no tensor without elements"),
        ("g (int8[4] a) => (int8[4] y) { y = BitwiseAnd(a, a) }", "no fused kernel computes its BitwiseAnd"),
        (
            "g (int64[n] a, int64[m] b) => (int64[k] y) { y = BitwiseOr(a, b) }",
            "no fused kernel computes its BitwiseOr",
        ),
        (BRANCH, "no fused kernel computes its BitwiseAnd"),
    ],
)
def test_a_node_that_becomes_no_kernel_is_named(text: str, reason: str | None) -> None:
    found = lacks_kernel(ir.from_proto(onnx.parser.parse_model(HEADER + text)))
    assert found is None if reason is None else found is not None and found.endswith(reason)
