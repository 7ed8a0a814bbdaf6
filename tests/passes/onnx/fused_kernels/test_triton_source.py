"""The Triton source of a kernel computes the same as its NumPy form, in Triton's interpreter."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
import torch
from generated_graphs import GraphMaker, as_numpy, as_torch, inputs_of
from kernel_resources import instructions, resources
from test_entries import GRADIENT as ROTATED_BACK
from test_entries import ROTATED, EntriesMaker
from test_fuse_kernels import (
    GRADIENT,
    HEADER,
    JOINED,
    LOSS,
    assert_same,
    cross_entropy,
    fused,
    interpreted,
)
from test_totals import generated, statistics
from triton_interpreter import interpret

from ort_dynamo.passes.onnx.fuse_kernels import fused_kernels, fused_ops
from ort_dynamo.passes.onnx.fused_kernels.triton_source import fused_op
from ort_dynamo.runtime.kernels.fused_kernel import CompiledKernel
from ort_dynamo.runtime.kernels.kernel_compiler import compile_kernels, triton_version

pytestmark = pytest.mark.skipif(triton_version() is None, reason="there is no Triton")


def assert_interpreted(model: ir.Model, inputs: dict[str, np.ndarray]) -> int:
    """Compare each fused node of a model on its inputs there; gives the number of nodes."""
    seen = 0
    for found, expected in interpreted(model, inputs):
        # Where a number lies between two of a half type, another order of a sum is enough for the other one.
        is_half = any(one.dtype.name in ("bfloat16", "float16") for one in expected.values())
        assert_same(found, expected, 2e-2 if is_half else 2e-5)
        seen += 1
    return seen


@pytest.mark.parametrize("seed", range(24))
def test_the_kernels_of_a_generated_graph(seed: int) -> None:
    plain = GraphMaker(seed, symbolic=bool(seed % 2)).model()
    assert_interpreted(fused(plain), inputs_of(plain, seed, {"rows": 5}))


@pytest.mark.parametrize("seed", range(8))
def test_the_kernels_of_generated_entries(seed: int) -> None:
    plain = onnx.parser.parse_model(HEADER + EntriesMaker(seed).text())
    assert_interpreted(fused(plain), inputs_of(plain, seed, {}))


@pytest.mark.parametrize("text", [ROTATED, ROTATED_BACK], ids=["forward", "gradient"])
def test_the_kernel_of_a_rotary_embedding_of_neighbouring_columns(text: str) -> None:
    plain = onnx.parser.parse_model(HEADER + text)
    assert assert_interpreted(fused(plain), inputs_of(plain, 0, {"N": 2})) == 1


def test_kernels_that_join_pieces_and_add_up_columns() -> None:
    plain = onnx.parser.parse_model(HEADER + JOINED)
    assert assert_interpreted(fused(plain), inputs_of(plain, 0, {})) >= 1


@pytest.mark.parametrize("dtype", ["float", "double", "float16", "bfloat16"])
def test_the_negative_of_zero_has_a_sign(dtype: str) -> None:
    model = fused(f"g ({dtype}[4] x) => ({dtype}[4] y) {{ a = Neg(x)  y = Reciprocal(a) }}")
    inputs = {"x": np.array([0.0, -0.0, 2.0, np.nan]).astype(ir.DataType[dtype.upper()].numpy())}
    (op,) = fused_ops(model)
    assert "= -v" not in op.source  # which is 0 - v in Triton 3.6, and so 0 for 0
    assert assert_interpreted(model, inputs) == 1
    (found,) = interpret(op, [as_torch(inputs["x"])])
    np.testing.assert_array_equal(as_numpy(found).astype(np.float64), [-np.inf, np.inf, -0.5, np.nan])


@pytest.mark.parametrize("dtype", ["float", "double"])
def test_a_constant_zero_has_its_sign(dtype: str) -> None:
    model = fused(
        f"g ({dtype}[3] x, bool[3] m) => ({dtype}[3] y) <{dtype} z = {{-0.0}}> {{ a = Where(m, x, z)  y = Div(x, a) }}"
    )
    inputs = {"x": np.array([1, 2, 3], ir.DataType[dtype.upper()].numpy()), "m": np.array([True, False, True])}
    (op,) = fused_ops(model)
    assert "-0.0" not in op.source  # which Triton 3.6 takes for 0.0
    (found,) = interpret(op, [as_torch(inputs["m"]), as_torch(inputs["x"])])
    np.testing.assert_array_equal(as_numpy(found), [1, -np.inf, 1])


@pytest.mark.parametrize("width", [50, 8192, 20000])
@pytest.mark.parametrize("text", [LOSS, GRADIENT], ids=["loss", "gradient"])
@pytest.mark.parametrize("odd", [0.0, float("nan"), float("inf")])
def test_the_kernels_of_a_cross_entropy(text: str, width: int, odd: float) -> None:
    plain, inputs = cross_entropy(text, width)
    inputs["x"][2, -1] += np.asarray(odd, inputs["x"].dtype)
    assert assert_interpreted(fused(plain), inputs) == 1


@pytest.mark.parametrize(("rows", "columns"), [(24, 40), (4096, 96), (512, 100), (64, 64), (131, 40), ("N", 100)])
def test_the_kernels_of_statistics(rows: int | str, columns: int) -> None:
    plain = statistics(rows, columns)
    for number in (1, 130) if rows == "N" else (0,):
        assert assert_interpreted(fused(plain), inputs_of(plain, 0, {"N": number})) >= 2


@pytest.mark.parametrize("seed", range(16))
def test_the_kernels_of_generated_statistics(seed: int) -> None:
    if (plain := generated(seed)) is not None:
        assert_interpreted(fused(plain), inputs_of(plain, seed, {"N": 70}))


class Integers(np.ndarray[Any, Any]):
    """Integers of a kernel: of 32 bits and wrapping around, or of 64."""

    def to(self, dtype: type[np.integer[Any]]) -> Integers:
        return self.astype(dtype).view(Integers)


def first_offsets(source: str, row: int, first: int) -> np.ndarray[Any, Any]:
    """The offsets of a kernel's first load: of the columns from `first` of a row, as Triton's integers give them."""
    tl = SimpleNamespace(
        arange=lambda first, end: np.arange(first, end, dtype=np.int32).view(Integers),
        program_id=lambda axis: np.array([row], np.int32).view(Integers),
        int64=np.int64,
    )
    names: dict[str, Any] = {"tl": tl, "first": np.int32(first)}
    for name in ("p", "r", "c"):
        if line := re.search(rf"^ *{name} = (.+)$", source, re.MULTILINE):
            names[name] = eval(line[1], names)
    load = re.search(r"tl\.load\(in0 \+ (.+?), ", source)
    assert load is not None
    return np.asarray(eval(load[1], names)).reshape(-1)


ROWS = 1 << 20


@pytest.mark.parametrize("width", [128, 1024], ids=["whole rows", "long rows"])
def test_columns_that_are_far_apart_have_offsets_of_64_bits(width: int) -> None:
    # Heads, rows, width: the heads of one row are as many elements apart as a head has.
    model = fused(f"""g (bfloat16[32,{ROWS},{width}] x) => (float[{ROWS},{32 * width}] y)
      <int64[2] flat = {{{ROWS},{32 * width}}}, int64[1] one = {{1}}> {{
      t = Transpose<perm=[1,0,2]>(x)  f = Reshape(t, flat)  w = Cast<to=1>(f)
      s = Mul(w, w)  m = ReduceMean<keepdims=1>(s, one)  y = Div(w, m)
    }}""")
    (op,) = fused_ops(model)
    columns = np.arange(32 * width)[-4096:]
    right = (ROWS - 1) * width + columns // width * ROWS * width + columns % width
    np.testing.assert_array_equal(first_offsets(op.source, ROWS - 1, int(columns[0])), right)


def test_a_kernel_of_each_kind_compiles_for_a_device_and_spills_nothing() -> None:
    texts = [JOINED, *(text.replace("WIDTH", str(width)) for text in (LOSS, GRADIENT) for width in (50, 20000))]
    ops = {op.name: op for text in texts for op in fused_ops(fused(text))}
    ops |= {op.name: op for rows in (4096, "N") for op in fused_ops(fused(statistics(rows, 96)))}
    ops |= {op.name: op for seed in range(4) for op in fused_ops(fused(GraphMaker(seed, symbolic=True).model()))}
    assert len(ops) > 8
    for name, found in compile_kernels([*ops.values()], (9, 0)).items():
        assert isinstance(found, CompiledKernel), (name, found)
        for variant in (found.aligned, found.unaligned):
            taken = resources(variant.cubin)
            assert taken.local == 0, name
            assert taken.registers <= 255


@pytest.mark.parametrize(
    ("text", "factor"),
    [
        ("n = Neg(x)  m = Neg(n)  y = com.microsoft.Gelu(m)", lambda x: x),
        ("e = Erf(x)  y = HardSigmoid<alpha=0.5, beta=0.5>(e)", lambda x: np.ones_like(x)),
    ],
    ids=["gelu", "distribution"],
)
def test_the_normal_distribution_is_as_exact_as_float32_near_1(text: str, factor: Callable[[Any], Any]) -> None:
    """It is off by 1.5e-7, and in its tail by 3e-5 of itself, where 1 + erf in float32 has lost most digits."""
    model = fused(f"g (float[30008] x) => (float[30008] y) {{ {text} }}")
    ends = [0.0, -0.0, math.inf, -math.inf, math.nan, 3e38, -3e38, 1e-30]
    x = np.concatenate([np.linspace(-9, 9, 30_000), ends]).astype(np.float32)
    (node,) = model.graph
    op = fused_op(fused_kernels(model)[node.op_type], node.op_type)
    (found,) = map(as_numpy, interpret(op, [torch.from_numpy(x)]))
    scaled = x.astype(np.float64) * (math.sqrt(0.5) if "Gelu" in text else 1)
    with np.errstate(invalid="ignore"):
        expected = np.array([math.erfc(-one) / 2 for one in scaled]) * factor(x.astype(np.float64))
    np.testing.assert_allclose(found[-8:], expected[-8:], rtol=1e-6)
    x, found, expected, scaled = (one[:-8] for one in (x, found, expected, scaled))
    size = np.maximum(1, np.abs(factor(x)))
    np.testing.assert_allclose(found / size, expected / size, rtol=0, atol=1.5e-7)
    tail = (scaled > -4.5) & (scaled < 0)
    np.testing.assert_allclose(found[tail], expected[tail], rtol=3e-5)


def test_a_gelu_takes_few_instructions() -> None:
    """An H200 issues 28 instructions a lane while it moves an element's four bytes, at 1.755 GHz and 4.3 TB/s."""
    model = fused("""g (bfloat16[8192,4096] x, bfloat16[4096] b) => (bfloat16[8192,4096] y) {
      wide = Cast<to=1>(x)  bias = Cast<to=1>(b)  sum = Add(wide, bias)
      g = com.microsoft.Gelu(sum)  y = Cast<to=16>(g)
    }""")
    (op,) = fused_ops(model)
    kernel = compile_kernels([op], (9, 0))[op.name]
    assert isinstance(kernel, CompiledKernel), kernel
    elements = op.per_program / (32 * op.num_warps)
    assert instructions(kernel.aligned.cubin) <= 30 * elements  # with the padding at the end
