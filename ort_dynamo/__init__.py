"""PyTorch training on ONNX Runtime: torch.compile(model, backend="ort_train").

The backend registers itself by entry point; importing this package is not needed to use it. The package loads the names
that it exports on first use, so importing it, as the command line does, does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ort_dynamo.explanation.explanation import Explanation
    from ort_dynamo.explanation.run import explain
    from ort_dynamo.lowering.context import LoweringContext
    from ort_dynamo.lowering.registry import register_lowering
    from ort_dynamo.options.cast_strategy import PropagateCastOpsStrategy
    from ort_dynamo.passes.outside import register_pass
    from ort_dynamo.report.memory_plan import MemoryPlan, memory_plan
    from ort_dynamo.report.require import require_compiled
    from ort_dynamo.report.summary import Summary, summary
    from ort_dynamo.training import amp, optim
    from ort_dynamo.training.legacy_descriptions import IODescription, ModelDescription
    from ort_dynamo.training.ortmodule import DebugOptions, LogLevel, ORTModule
    from ort_dynamo.training.orttrainer import ORTTrainer
    from ort_dynamo.training.orttrainer_options import ORTTrainerOptions
    from ort_dynamo.training.train_step_info import TrainStepInfo
    from ort_dynamo.training.training_graph import export_training_graph

    __version__: str

__all__ = [
    "DebugOptions",
    "Explanation",
    "IODescription",
    "LogLevel",
    "LoweringContext",
    "MemoryPlan",
    "ModelDescription",
    "ORTModule",
    "ORTTrainer",
    "ORTTrainerOptions",
    "PropagateCastOpsStrategy",
    "Summary",
    "TrainStepInfo",
    "__version__",
    "amp",
    "explain",
    "export_training_graph",
    "memory_plan",
    "optim",
    "register_lowering",
    "register_pass",
    "require_compiled",
    "summary",
]

_HOME = {
    "DebugOptions": "ort_dynamo.training.ortmodule",
    "Explanation": "ort_dynamo.explanation.explanation",
    "IODescription": "ort_dynamo.training.legacy_descriptions",
    "LogLevel": "ort_dynamo.training.ortmodule",
    "LoweringContext": "ort_dynamo.lowering.context",
    "MemoryPlan": "ort_dynamo.report.memory_plan",
    "ModelDescription": "ort_dynamo.training.legacy_descriptions",
    "ORTModule": "ort_dynamo.training.ortmodule",
    "ORTTrainer": "ort_dynamo.training.orttrainer",
    "ORTTrainerOptions": "ort_dynamo.training.orttrainer_options",
    "PropagateCastOpsStrategy": "ort_dynamo.options.cast_strategy",
    "Summary": "ort_dynamo.report.summary",
    "TrainStepInfo": "ort_dynamo.training.train_step_info",
    "amp": "ort_dynamo.training",
    "explain": "ort_dynamo.explanation.run",
    "export_training_graph": "ort_dynamo.training.training_graph",
    "memory_plan": "ort_dynamo.report.memory_plan",
    "optim": "ort_dynamo.training",
    "register_lowering": "ort_dynamo.lowering.registry",
    "register_pass": "ort_dynamo.passes.outside",
    "require_compiled": "ort_dynamo.report.require",
    "summary": "ort_dynamo.report.summary",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version("ort-dynamo")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
