"""The number of inputs of a kernel is limited, by a limit for narrow ones and one for the others."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from test_fuse_kernels import fused, with_kernels

ROWS = 32


def product_of(wide: int, narrow: int, size: str = str(ROWS)) -> str:
    """A chain of products: rows of eight columns by a value for each column."""
    inputs = [f"float[{size}, 8] w{i}" for i in range(wide)] + [f"float[8] n{i}" for i in range(narrow)]
    names = [one.split()[-1] for one in inputs]
    lines = [f"p{i} = Mul({names[0] if i == 1 else f'p{i - 1}'}, {names[i]})" for i in range(1, len(names))]
    return f"g ({', '.join(inputs)}) => (float[{size}, 8] p{len(names) - 1}) {{ {'  '.join(lines)} }}"


@pytest.mark.parametrize("size", [str(ROWS), "N"])
@pytest.mark.parametrize(("wide", "narrow", "count"), [(12, 0, 1), (13, 0, 2), (1, 12, 1), (1, 13, 2), (12, 12, 1)])
def test_narrow_inputs_count_apart(wide: int, narrow: int, count: int, size: str) -> None:
    model = fused(product_of(wide, narrow, size))
    assert len(list(model.graph)) == count
    random = np.random.default_rng(0)
    given = {
        value.name: random.standard_normal((ROWS, 8) if value.name.startswith("w") else 8).astype(np.float32)
        for value in model.graph.inputs
        if value.name is not None
    }
    (found,) = with_kernels(model, given, body=False).values()
    expected = np.prod([np.broadcast_to(one, (ROWS, 8)) for one in given.values()], axis=0, dtype=np.float64)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_a_norm_of_two_branches_reads_their_gradients_twice() -> None:
    """The sums and the results of two batch norms behind one sum, as in a residual block with a projection."""
    text = """g (float16[6400, 64] g, float16[6400, 64] h, float16[6400, 64] y, float16[6400, 64] x, float[64] m,
      float[64] r, float[64] w, float16[6400, 64] u, float[64] n, float[64] s, float[64] v)
      => (float16[6400, 64] dx, float16[6400, 64] du) <float zero = {0}, int64[1] rows = {0}> {
      gw = Cast<to=1>(g)  hw = Cast<to=1>(h)  yw = Cast<to=1>(y)  xw = Cast<to=1>(x)  uw = Cast<to=1>(u)
      sum = Add(gw, hw)  off = LessOrEqual(yw, zero)  d = Where(off, zero, sum)
      xm = Sub(xw, m)  xh = Mul(xm, r)  dxh = Mul(d, xh)  a = ReduceSum<keepdims=0>(d, rows)
      b = ReduceSum<keepdims=0>(dxh, rows)
      um = Sub(uw, n)  uh = Mul(um, s)  duh = Mul(d, uh)  c = ReduceSum<keepdims=0>(duh, rows)
      xb = Mul(xh, b)  d1 = Sub(d, a)  d2 = Sub(d1, xb)  d3 = Mul(d2, w)  d4 = Mul(d3, r)  dx = Cast<to=10>(d4)
      ub = Mul(uh, c)  e2 = Sub(d1, ub)  e3 = Mul(e2, v)  e4 = Mul(e3, s)  du = Cast<to=10>(e4)
    }"""
    model = fused(text)
    between = {value.name for node in model.graph for value in node.outputs if value.shape == ir.Shape([6400, 64])}
    assert between == {"dx", "du", "off"}, "the kernels compute all but the condition twice"
