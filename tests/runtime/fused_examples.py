"""Kernels as a printer of sources would make them: pointwise, activations both ways, rows, and a transposed tile."""

from __future__ import annotations

from ort_dynamo.graph.fused_op import FusedOp, FusedOutput, Size

FLOAT, BFLOAT16, BOOL = 1, 16, 9
TYPES = {FLOAT: "tl.float32", BFLOAT16: "tl.bfloat16"}

_HEAD = """
import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
"""
_POINTWISE = """    i = tl.program_id(0).to(tl.int64) * 1024 + tl.arange(0, 1024)
    m = i < s0 * COLUMNS
    x = tl.load(in0 + i, m, other=0.0).to(tl.float32)
"""


def add_bias(dtype: int, columns: int = 1024) -> FusedOp:
    """A matrix and a row."""
    return _pointwise(
        "add_bias",
        (dtype, dtype),
        dtype,
        columns,
        "    b = tl.load(in1 + i % COLUMNS, m, other=0.0).to(tl.float32)\n    y = x + b\n",
    )


def gelu(dtype: int, columns: int = 1024) -> FusedOp:
    """GELU by erf."""
    return _pointwise(
        "gelu",
        (dtype,),
        dtype,
        columns,
        "    y = 0.5 * x * (1.0 + libdevice.erf(x * 0.7071067811865476))\n",
    )


def gelu_gradient(dtype: int, columns: int = 1024) -> FusedOp:
    """GELU's gradient: of the input by that of the output."""
    return _pointwise(
        "gelu_gradient",
        (dtype, dtype),
        dtype,
        columns,
        "    dy = tl.load(in1 + i, m, other=0.0).to(tl.float32)\n"
        "    cdf = 0.5 * (1.0 + libdevice.erf(x * 0.7071067811865476))\n"
        "    pdf = libdevice.exp(-0.5 * x * x) * 0.3989422804014327\n"
        "    y = dy * (cdf + x * pdf)\n",
    )


def layer_norm(dtype: int, columns: int = 1024) -> FusedOp:
    """Rows less their mean, by their standard deviation, which is a second output."""
    block = 1 << (columns - 1).bit_length()
    source = f"""{_HEAD}def layer_norm(in0, out0, out1, s0):
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, {block})
    m = c < {columns}
    x = tl.load(in0 + row * {columns} + c, m, other=0.0).to(tl.float32)
    mean = tl.sum(x, 0) * {1 / columns!r}
    centered = tl.where(m, x - mean, 0.0)
    variance = tl.sum(centered * centered, 0) * {1 / columns!r}
    r = 1.0 / tl.sqrt_rn(variance + 1e-05)
    tl.store(out0 + row * {columns} + c, (centered * r).to({TYPES[dtype]}), m)
    tl.store(out1 + row, r)
"""
    rows = Size(1, (0,))
    outputs = (FusedOutput(dtype, (rows, Size(columns))), FusedOutput(FLOAT, (rows, Size(1))))
    return FusedOp("layer_norm", (dtype,), outputs, ((0, 0),), rows, 1, source)


def transpose(dtype: int, rows: int = 256, columns: int = 512) -> FusedOp:
    """[batch, rows, columns] as [batch, columns, rows], by tiles of 64 × 64."""
    across, down = -(-columns // 64), -(-rows // 64)
    source = f"""{_HEAD}def transpose(in0, out0, s0):
    p = tl.program_id(0).to(tl.int64)
    base = p // {across * down} * {rows * columns}
    r = p % {across * down} // {across} * 64 + tl.arange(0, 64)
    c = p % {across} * 64 + tl.arange(0, 64)
    x = tl.load(in0 + base + r[:, None] * {columns} + c[None, :], (r < {rows})[:, None] & (c < {columns})[None, :])
    m = (c < {columns})[:, None] & (r < {rows})[None, :]
    tl.store(out0 + base + c[:, None] * {rows} + r[None, :], tl.trans(x), m)
"""
    batch = Size(1, (0,))
    output = FusedOutput(dtype, (batch, Size(columns), Size(rows)))
    return FusedOp("transpose", (dtype,), (output,), ((0, 0),), batch * Size(across * down), 1, source)


EXAMPLES = (add_bias, gelu, gelu_gradient, layer_norm, transpose)


def _pointwise(name: str, inputs: tuple[int, ...], dtype: int, columns: int, body: str) -> FusedOp:
    parameters = ", ".join(f"in{index}" for index in range(len(inputs)))
    source = f"{_HEAD}def {name}({parameters}, out0, s0):\n{_POINTWISE}{body}"
    source += f"    tl.store(out0 + i, y.to({TYPES[dtype]}), m)\n"
    rows = Size(1, (0,))
    output = FusedOutput(dtype, (rows, Size(columns)))
    count = rows * Size(columns)
    return FusedOp(name, inputs, (output,), ((0, 0),), count, 1024, source.replace("COLUMNS", str(columns)))
