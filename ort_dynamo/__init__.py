"""PyTorch training on ONNX Runtime: torch.compile(model, backend="ort_train").

The backend registers itself by entry point; importing this package is not needed to use it. What it offers by name is
loaded on first use, so that an import of the package, as the command line does, does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ort_dynamo.cast_strategy import PropagateCastOpsStrategy
    from ort_dynamo.lowering.context import LoweringContext
    from ort_dynamo.lowering.registry import register_lowering
    from ort_dynamo.planning import MemoryPlan, memory_plan

__all__ = ["LoweringContext", "MemoryPlan", "PropagateCastOpsStrategy", "memory_plan", "register_lowering"]

_HOME = {
    "LoweringContext": "ort_dynamo.lowering.context",
    "MemoryPlan": "ort_dynamo.planning",
    "PropagateCastOpsStrategy": "ort_dynamo.cast_strategy",
    "memory_plan": "ort_dynamo.planning",
    "register_lowering": "ort_dynamo.lowering.registry",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
