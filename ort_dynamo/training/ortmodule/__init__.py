"""ORTModule: the interface of onnxruntime.training.ortmodule, on this backend.

The constants may be changed by assignment to this module, before an ORTModule is made.
"""

from __future__ import annotations

from torch import are_deterministic_algorithms_enabled as _are_deterministic_algorithms_enabled  # noqa: F401

from ort_dynamo.embedding import OPSET as ONNX_OPSET_VERSION
from ort_dynamo.training.ortmodule.debug_options import DebugOptions
from ort_dynamo.training.ortmodule.fallback import DEFAULT_POLICY as ORTMODULE_FALLBACK_POLICY
from ort_dynamo.training.ortmodule.fallback import (
    ORTModuleDeviceException,
    ORTModuleFallbackException,
    ORTModuleInitException,
    ORTModuleIOError,
    ORTModuleONNXModelException,
    ORTModuleTorchModelException,
)
from ort_dynamo.training.ortmodule.graph_optimizer_registry import register_graph_optimizer
from ort_dynamo.training.ortmodule.logger import LogLevel
from ort_dynamo.training.ortmodule.wrapper import ORTModule

__all__ = [
    "MINIMUM_RUNTIME_PYTORCH_VERSION_STR",
    "ONNX_OPSET_VERSION",
    "ORTMODULE_FALLBACK_POLICY",
    "ORTMODULE_FALLBACK_RETRY",
    "DebugOptions",
    "LogLevel",
    "ORTModule",
    "ORTModuleDeviceException",
    "ORTModuleFallbackException",
    "ORTModuleIOError",
    "ORTModuleInitException",
    "ORTModuleONNXModelException",
    "ORTModuleTorchModelException",
    "register_graph_optimizer",
]

MINIMUM_RUNTIME_PYTORCH_VERSION_STR = "2.11"
ORTMODULE_FALLBACK_RETRY = False
