"""The element types of checkpoints, and conversions of tensors to arrays and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

__all__ = ["NATIVE", "array_of", "dtype_stored_as_bytes", "is_stored", "tensor_of"]

NATIVE = frozenset(
    f"{kind}{bits}"
    for kind, widths in (("int", (8, 16, 32, 64)), ("uint", (8, 16, 32, 64)), ("float", (16, 32, 64)))
    for bits in widths
) | {"bool"}
"""Names of the dtypes that HDF5 stores natively."""

_COMPLEX = ("complex64", "complex128")
_SMALL_FLOATS = ("bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
"""Floats that NumPy has through ml_dtypes; PyTorch has the same names."""


def is_stored(dtype: np.dtype[Any]) -> bool:
    """Check whether arrays of a dtype can be stored."""
    return dtype.name in NATIVE or dtype.name in _COMPLEX or dtype.name in _SMALL_FLOATS


def dtype_stored_as_bytes(name: str) -> np.dtype[Any]:
    """Find the dtype of a name that HDF5 does not have, stored as bytes; raises ValueError for any other."""
    if name in _COMPLEX:
        return np.dtype(name)
    if name in _SMALL_FLOATS:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))
    raise ValueError(f"{name!r} is not an element type of a checkpoint")


def array_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Convert a tensor to an array of the same shape and element type, on the CPU; it may share memory.

    Raises:
        TypeError: the tensor is not dense, has no values, or has an unsupported element type.
    """
    name = str(tensor.dtype).removeprefix("torch.")
    if tensor.layout != torch.strided or tensor.is_meta or not (name in NATIVE or name in _COMPLEX + _SMALL_FLOATS):
        raise TypeError(f"a tensor of layout {tensor.layout}, dtype {tensor.dtype} on {tensor.device}")
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    if name not in _SMALL_FLOATS:
        return tensor.numpy()
    return tensor.contiguous().view(_bits(tensor.element_size())).numpy().view(dtype_stored_as_bytes(name))


def tensor_of(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """Take an array that `array_of` made back to a tensor, of the same memory."""
    if array.dtype.name not in _SMALL_FLOATS:
        return torch.from_numpy(array)
    dtype: torch.dtype = getattr(torch, array.dtype.name)
    return torch.from_numpy(array.view(np.uint8 if array.itemsize == 1 else np.int16)).view(dtype)


def _bits(itemsize: int) -> torch.dtype:
    return torch.uint8 if itemsize == 1 else torch.int16
