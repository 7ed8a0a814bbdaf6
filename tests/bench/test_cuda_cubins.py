"""bench/cuda_cubins.py counts the instructions that a kernel executes."""

from __future__ import annotations

import onnx.parser
import onnx_ir as ir
import pytest

from ort_dynamo.passes.onnx.fuse_kernels import FuseKernels, fused_ops
from ort_dynamo.runtime.kernels.fused_kernel import CompiledKernel
from ort_dynamo.runtime.kernels.kernel_compiler import compile_kernels, triton_version

cuda_cubins = pytest.importorskip("bench.cuda_cubins", reason="bench is importable under `python -m pytest` only")
pytestmark = pytest.mark.skipif(triton_version() is None, reason="there is no Triton")


def counted(text: str) -> float:
    """The instructions of a warp of the first kernel of a graph."""
    model = ir.from_proto(onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : 18]>\ng {text}'))
    FuseKernels()(model)
    op = next(iter(fused_ops(model)))
    kernel = compile_kernels([op], (9, 0))[op.name]
    assert isinstance(kernel, CompiledKernel), kernel
    count: float = cuda_cubins.instructions(op, kernel.aligned.cubin)
    return count


@pytest.mark.parametrize(
    "text",
    [
        """(bfloat16[ROWS,64] x) => (float[64] s) <int64[1] zero = {0}> {
          w = Cast<to=1>(x)  e = Tanh(w)  s = ReduceSum<keepdims=0>(e, zero)
        }""",
        """(float[ROWS,1024] x) => (float[ROWS,1024] y, float[1024] s) <int64[1] zero = {0}> {
          y = Softmax<axis=-1>(x)  s = ReduceSum<keepdims=0>(y, zero)
        }""",
        """(float[64,ROWS] x) => (float[64,ROWS] y) { e = Exp(x)  y = Softmax<axis=-1>(e) }""",
    ],
    ids=["sums", "rows and sums", "long rows"],
)
def test_a_loop_counts_once_for_each_iteration(text: str) -> None:
    once, twice, four_times = (counted(text.replace("ROWS", str(rows))) for rows in (1 << 16, 1 << 17, 1 << 18))
    assert four_times - twice == pytest.approx(2 * (twice - once), rel=0.05)


def test_a_kernel_without_a_loop_counts_its_instructions() -> None:
    few, more = (
        counted(f"(float[4096] x) => (float[4096] y) {{ a = Neg(x)  b = Exp(a)  {c} }}")
        for c in ("y = Sqrt(b)", "d = Sqrt(b) y = Tanh(d)")
    )
    assert 30 < few < more < 1000
