"""Reads the opsets that an ONNX model imports."""

from __future__ import annotations

import onnx_ir as ir

__all__ = ["ONNX_DOMAINS", "is_older", "opset_of"]

ONNX_DOMAINS = ("", "ai.onnx")
"""The names of the domain of ONNX's own operators in opset imports; onnx_ir gives nodes the first."""


def opset_of(model: ir.Model, domain: str = "") -> int | None:
    """Return the version of a domain that a model imports; None if it imports none."""
    names = ONNX_DOMAINS if domain in ONNX_DOMAINS else (domain,)
    return next((model.opset_imports[name] for name in names if name in model.opset_imports), None)


def is_older(model: ir.Model, opset: int) -> bool:
    """Check whether a model imports an older opset of ONNX's own operators."""
    imported = opset_of(model)
    return imported is not None and imported < opset
