"""Models with fused operators, and the kernels that compute these on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx.parser

from ort_dynamo.fused_op import FusedOp, FusedOutput, Size
from ort_dynamo.runtime.fused_kernel import FusedKernel, HostFunction
from ort_dynamo.runtime.importing import onnxruntime
from ort_dynamo.runtime.kernel_callbacks import KernelCallbacks
from ort_dynamo.runtime.kernel_library import KernelLibrary

FLOAT = 1
N = Size(1, (0,))
Registration = KernelLibrary | KernelCallbacks


def rows_op(name: str, width: int = 4, per_program: int = 16) -> FusedOp:
    """An operator from float[n, width] to float[n, width]."""
    shape = (N, Size(width))
    return FusedOp(name, (FLOAT,), (FusedOutput(FLOAT, shape),), ((0, 0),), N * Size(width), per_program, "")


def rows_kernel(name: str, function: Callable[..., Any], width: int = 4) -> FusedKernel:
    """The operator `rows_op`, computed by a function of one array."""
    return FusedKernel(rows_op(name, width), HostFunction(function, ((N, Size(width)),)), None)


def model(graph: str, functions: str = "") -> bytes:
    """A serialised model of a graph `(…) => (…) { … }` in ONNX's text, with `fused.` before fused operators."""
    header = '<ir_version: 10, opset_import: ["" : 20, "ort_dynamo.fused" : 1]>'
    text = f"{header}\ng {graph}\n{functions}".replace("fused.", "ort_dynamo.fused.")
    return onnx.parser.parse_model(text).SerializeToString()


def body(name: str, nodes: str) -> str:
    """The function from `x` to `y` that stands for a fused operator."""
    return f'<domain: "ort_dynamo.fused", opset_import: ["" : 20]> {name} (x) => (y) {{ {nodes} }}\n'


def open_model(data: bytes, registration: Registration | None, kernels: Sequence[FusedKernel]) -> Any:
    """A session on the CPU; None registers nothing."""
    settings = onnxruntime().SessionOptions()
    settings.log_severity_level = 4  # errors become exceptions, which is enough
    if registration is not None:
        registration.register(settings, kernels)
    return onnxruntime().InferenceSession(data, settings, providers=["CPUExecutionProvider"])


def rows(count: int, width: int = 4) -> np.ndarray[Any, Any]:
    return np.arange(count * width, dtype=np.float32).reshape(count, width)
