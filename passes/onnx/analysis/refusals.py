"""Log why a fusion skips a node that looks like a match, under TORCH_LOGS=+ort_dynamo."""

from __future__ import annotations

import logging

import onnx_ir as ir

__all__ = ["refuse"]

_log = logging.getLogger(__name__)


def refuse(pass_: ir.passes.PassBase, node: ir.Node, reason: str) -> None:
    """Log at debug level why `pass_` does not change `node`."""
    _log.debug("%s leaves %s (%s): %s", type(pass_).__name__, node.outputs[0].name, node.op_type, reason)
