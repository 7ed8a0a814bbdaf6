"""The interpreter runs the example kernels correctly, and detects invalid accesses."""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

import pytest
import torch
from fused_examples import BFLOAT16, BOOL, FLOAT, add_bias, gelu, gelu_gradient, layer_norm, transpose
from triton_interpreter import DTYPES, FUNCTIONS, InterpreterFailedError, interpret

from ort_dynamo.graph.fused_op import FusedOp, FusedOutput, Size
from ort_dynamo.runtime.kernels.kernel_source import KernelSourceError

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

SIZES = [(1, 1), (3, 7), (5, 1000), (2, 1024), (0, 16)]
ROWS = Size(1, (0,))
HEAD = """
import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
"""


def vector(body: str, inputs: tuple[int, ...], output: int, parameters: str = "in0, out0, s0") -> FusedOp:
    """A kernel over a vector, 128 elements at a time."""
    source = f"{HEAD}def k({parameters}):\n    i = tl.program_id(0) * 128 + tl.arange(0, 128)\n    m = i < s0\n{body}"
    return FusedOp("k", inputs, (FusedOutput(output, (ROWS,)),), ((0, 0),), ROWS, 128, source)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [FLOAT, BFLOAT16])
def test_an_addition_is_torch_s_bit_for_bit(dtype: int, size: tuple[int, int]) -> None:
    x, b = torch.randn(size).to(DTYPES[dtype]), torch.randn(size[1]).to(DTYPES[dtype])
    [y] = interpret(add_bias(dtype, size[1]), [x, b])
    assert torch.equal(y, x + b)
    assert y.dtype == x.dtype


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [FLOAT, BFLOAT16])
def test_gelu_both_ways(dtype: int, size: tuple[int, int]) -> None:
    x, dy = (torch.randn(size).to(DTYPES[dtype]) for _ in range(2))
    wide = x.double().requires_grad_()
    y = torch.nn.functional.gelu(wide)
    [dx] = torch.autograd.grad(y, wide, dy.double())
    torch.testing.assert_close(interpret(gelu(dtype, size[1]), [x])[0], y.detach().to(x.dtype))
    torch.testing.assert_close(interpret(gelu_gradient(dtype, size[1]), [x, dy])[0], dx.to(x.dtype))


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_rows(size: tuple[int, int]) -> None:
    x = torch.randn(size)
    y, r = interpret(layer_norm(FLOAT, size[1]), [x])
    torch.testing.assert_close(y, torch.nn.functional.layer_norm(x, size[1:]))
    variance = (x - x.mean(1, keepdim=True)).square().mean(1, keepdim=True)
    torch.testing.assert_close(r, torch.rsqrt(variance + 1e-5))


@pytest.mark.parametrize("size", [(64, 64), (65, 63), (7, 130)], ids=str)
def test_tiles(size: tuple[int, int]) -> None:
    x = torch.randn(2, *size).bfloat16()
    assert torch.equal(interpret(transpose(BFLOAT16, *size), [x])[0], x.mT)


def test_float32_is_rounded_to_the_nearest_bfloat16_and_to_the_even_one_of_two() -> None:
    bits = torch.randint(-(2**31), 2**31 - 1, (5000,), dtype=torch.int32)
    halfway = (bits & -65536) | 0x8000
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 3.4e38, 1e-40, -1e-45])
    x = torch.cat([bits.view(torch.float32), halfway.view(torch.float32), special])
    op = vector("    tl.store(out0 + i, tl.load(in0 + i, m, other=0.0).to(tl.bfloat16), m)\n", (FLOAT,), BFLOAT16)
    [y] = interpret(op, [x])
    wanted = x.bfloat16()
    assert torch.equal(y.isnan(), wanted.isnan())
    kept = ~wanted.isnan()
    assert torch.equal(y.view(torch.int16)[kept], wanted.view(torch.int16)[kept])
    wide = vector("    tl.store(out0 + i, tl.load(in0 + i, m, other=0.0).to(tl.float32), m)\n", (BFLOAT16,), FLOAT)
    assert torch.equal(interpret(wide, [y])[0].view(torch.int32)[kept], wanted.float().view(torch.int32)[kept])


@pytest.mark.parametrize(("before", "after"), [(7, 16), (11, 16), (16, 7), (16, 10), (9, 16), (10, 16), (16, 11)])
def test_other_casts_of_bfloat16(before: int, after: int) -> None:
    x = (torch.arange(-150, 150) * 1.7).to(DTYPES[before])
    after_name = {7: "int64", 10: "float16", 11: "float64", 16: "bfloat16"}[after]
    op = vector(f"    tl.store(out0 + i, tl.load(in0 + i, m).to(tl.{after_name}), m)\n", (before,), after)
    assert torch.equal(interpret(op, [x])[0], x.to(DTYPES[after]))


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_libdevice(name: str) -> None:
    number = {"atan2": 2, "copysign": 2, "div_rn": 2, "fmod": 2, "hypot": 2, "pow": 2, "fma": 3}.get(name, 1)
    inputs = [torch.rand(200) * 0.9 + (name == "acosh") + 0.01 for _ in range(number)]
    names = [f"in{index}" for index in range(number)]
    loads = ", ".join(f"tl.load({one} + i, m, other=1.0)" for one in names)
    body = f"    tl.store(out0 + i, libdevice.{name}({loads}), m)\n"
    [y] = interpret(vector(body, (FLOAT,) * number, FLOAT, f"{', '.join(names)}, out0, s0"), inputs)
    torch.testing.assert_close(y, FUNCTIONS[name](*inputs), rtol=1e-5, atol=1e-6)


def test_libdevice_of_a_number_and_of_a_constant() -> None:
    body = "    n = libdevice.sqrt(s0.to(tl.float32))\n"
    body += "    tl.store(out0 + i, n * libdevice.pow(tl.load(in0 + i, m), 3.0), m)\n"
    x = torch.rand(16)
    torch.testing.assert_close(interpret(vector(body, (FLOAT,), FLOAT), [x])[0], 4 * x**3)


def test_masks_and_numbers_of_64_bits() -> None:
    body = "    kept = tl.load(in0 + i, m) != 0\n    tl.store(out0 + i, tl.where(kept, s0 << 40, -1), m)\n"
    keep = torch.arange(200) % 3 == 0
    [y] = interpret(vector(body, (BOOL,), 7), [keep])
    assert torch.equal(y, torch.where(keep, 200 << 40, -1))


WRONG: list[tuple[str, str]] = [
    ("    tl.store(out0 + i, tl.load(in0 + i, m))\n", "output 0 is written beyond its end"),
    ("    tl.store(out0 + i - 1, tl.load(in0 + i, m), m)\n", "output 0 is written beyond its end"),
    ("    tl.store(out0 + i, tl.load(in0 + i, m), m & (i > 0))\n", "output 0 is not written everywhere"),
    ("    tl.store(out0 + i, tl.load(out0 + i, m), m)\n", "output 0 is not written everywhere, or depends on"),
    ("    tl.store(out0 + i, tl.load(in0 + i, m) + tl.arange(0, 3), m)\n", "power of 2"),
    ("    tl.store(out0 + i, libdevice.tanh(tl.load(in0 + i, m).to(tl.bfloat16)), m)\n", "has no function of bf16"),
    ("    tl.store(out0 + i, libdevice.tgamma(tl.load(in0 + i, m)), m)\n", "libdevice has no tgamma"),
]


@pytest.mark.parametrize(("body", "said"), WRONG)
def test_an_invalid_kernel_is_an_error(body: str, said: str) -> None:
    with pytest.raises(InterpreterFailedError, match=said):
        interpret(vector(body, (FLOAT,), FLOAT), [torch.rand(130)])


def test_a_read_beyond_the_end_gives_no_number() -> None:
    body = "    tl.store(out0 + i, tl.load(in0 + i + 1, m), m)\n"
    [y] = interpret(vector(body, (FLOAT,), FLOAT), [torch.rand(130)])
    assert y.isnan().tolist() == [False] * 129 + [True]


def test_a_kernel_that_ends_the_process_is_an_error_and_the_next_one_runs() -> None:
    body = "    tl.store(out0 + i, tl.load(in0 + i + (s0 << 40), m), m)\n"
    with pytest.raises(InterpreterFailedError, match="the interpreter ended with status -11"):
        interpret(vector(body, (FLOAT,), FLOAT), [torch.rand(130)])
    assert torch.equal(interpret(transpose(FLOAT, 2, 3), [torch.ones(1, 2, 3)])[0], torch.ones(1, 3, 2))


def test_a_source_that_would_not_be_compiled_is_not_interpreted() -> None:
    op: Any = dataclasses.replace(gelu(FLOAT), source=gelu(FLOAT).source + "import os\n")
    with pytest.raises(KernelSourceError):
        interpret(op, [torch.rand(2, 1024)])
