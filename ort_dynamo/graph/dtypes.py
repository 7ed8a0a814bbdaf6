"""The one table of dtypes: torch on one side, ONNX on the other."""

from __future__ import annotations

import onnx_ir as ir
import torch

__all__ = ["ONNX_TO_TORCH", "TORCH_TO_ONNX", "is_representable", "onnx_dtype", "onnx_tensor"]

TORCH_TO_ONNX: dict[torch.dtype, ir.DataType] = {
    torch.float32: ir.DataType.FLOAT,
    torch.float64: ir.DataType.DOUBLE,
    torch.float16: ir.DataType.FLOAT16,
    torch.bfloat16: ir.DataType.BFLOAT16,
    torch.int8: ir.DataType.INT8,
    torch.int16: ir.DataType.INT16,
    torch.int32: ir.DataType.INT32,
    torch.int64: ir.DataType.INT64,
    torch.uint8: ir.DataType.UINT8,
    torch.bool: ir.DataType.BOOL,
}

ONNX_TO_TORCH: dict[int, torch.dtype] = {int(onnx_type): dtype for dtype, onnx_type in TORCH_TO_ONNX.items()}
"""The same table from ONNX's side, by the numbers of TensorProto and of ir.DataType."""


def is_representable(dtype: torch.dtype) -> bool:
    """Check whether values of `dtype` can cross into an ONNX Runtime session."""
    return dtype in TORCH_TO_ONNX


def onnx_dtype(dtype: torch.dtype) -> ir.DataType:
    """Return the ONNX element type of `dtype`; KeyError for complex, quantised and other types without one."""
    return TORCH_TO_ONNX[dtype]


def onnx_tensor(tensor: torch.Tensor, name: str) -> ir.TensorProtocol:
    """Copy a tensor to ONNX; KeyError for a dtype without an ONNX element type."""
    own = tensor.detach().cpu().contiguous()
    if own.dtype is torch.bfloat16:
        return ir.tensor(own.view(torch.uint16).numpy().view(ir.DataType.BFLOAT16.numpy()).copy(), name=name)
    return ir.tensor(own.numpy().copy(), dtype=onnx_dtype(own.dtype), name=name)
