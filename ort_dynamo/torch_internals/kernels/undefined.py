"""List the operators that give memory which nobody has filled."""

from __future__ import annotations

from ort_dynamo.torch_internals.kernels.operators import aten

__all__ = ["UNDEFINED"]

UNDEFINED = (
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
)
"""Operators whose numbers nobody defines."""
