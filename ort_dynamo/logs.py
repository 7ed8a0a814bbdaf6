"""Loggers. `TORCH_LOGS=ort_train` (or `+ort_train` for debug) shows them like torch's own."""

from __future__ import annotations

import logging

import torch._logging._internal as _torch_logging

__all__ = ["get_logger"]

_NAME = "ort_dynamo"

if "ort_train" not in _torch_logging.log_registry.log_alias_to_log_qnames:
    _torch_logging.register_log("ort_train", _NAME)


def get_logger(module: str) -> logging.Logger:
    """The logger of a module of this package, under the name that TORCH_LOGS=ort_train switches on."""
    return logging.getLogger(module)
