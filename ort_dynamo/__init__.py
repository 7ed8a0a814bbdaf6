"""PyTorch training on ONNX Runtime: torch.compile(model, backend="ort_train").

The backend registers itself by entry point; importing this package is not needed to use it. The package loads the names
that it exports on first use, so importing it, as the command line does, does not import torch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ort_dynamo.explanation.explanation import Explanation
    from ort_dynamo.explanation.memory_plan import MemoryPlan, memory_plan
    from ort_dynamo.explanation.run import explain
    from ort_dynamo.lowering.context import LoweringContext
    from ort_dynamo.lowering.registry import register_lowering
    from ort_dynamo.options.cast_strategy import PropagateCastOpsStrategy
    from ort_dynamo.passes.outside import register_pass
    from ort_dynamo.report.require import require_compiled
    from ort_dynamo.report.summary import Summary, summary
    from ort_dynamo.runtime.observe.node_profile import NodeProfile, profile_nodes
    from ort_dynamo.statistics.collect import CollectedStatistics, collect_statistics
    from ort_dynamo.statistics.compare import StatisticsComparison, ValueDifference, compare_statistics
    from ort_dynamo.statistics.run import RunStatistics, load_statistics
    from ort_dynamo.statistics.values import ValueStatistics
    from ort_dynamo.training import amp, optim
    from ort_dynamo.training.legacy_descriptions import IODescription, ModelDescription
    from ort_dynamo.training.ortmodule import DebugOptions, LogLevel, ORTModule
    from ort_dynamo.training.orttrainer import ORTTrainer
    from ort_dynamo.training.orttrainer_options import ORTTrainerOptions
    from ort_dynamo.training.train_step_info import TrainStepInfo
    from ort_dynamo.training.training_graph import export_training_graph
    from ort_dynamo.verification.result import Verification
    from ort_dynamo.verification.verify import verify

    __version__: str

__all__ = [
    "CollectedStatistics",
    "DebugOptions",
    "Explanation",
    "IODescription",
    "LogLevel",
    "LoweringContext",
    "MemoryPlan",
    "ModelDescription",
    "NodeProfile",
    "ORTModule",
    "ORTTrainer",
    "ORTTrainerOptions",
    "PropagateCastOpsStrategy",
    "RunStatistics",
    "StatisticsComparison",
    "Summary",
    "TrainStepInfo",
    "ValueDifference",
    "ValueStatistics",
    "Verification",
    "__version__",
    "amp",
    "collect_statistics",
    "compare_statistics",
    "explain",
    "export_training_graph",
    "load_statistics",
    "memory_plan",
    "optim",
    "profile_nodes",
    "register_lowering",
    "register_pass",
    "require_compiled",
    "summary",
    "verify",
]

_HOME = {
    "CollectedStatistics": "ort_dynamo.statistics.collect",
    "DebugOptions": "ort_dynamo.training.ortmodule",
    "Explanation": "ort_dynamo.explanation.explanation",
    "IODescription": "ort_dynamo.training.legacy_descriptions",
    "LogLevel": "ort_dynamo.training.ortmodule",
    "LoweringContext": "ort_dynamo.lowering.context",
    "MemoryPlan": "ort_dynamo.explanation.memory_plan",
    "ModelDescription": "ort_dynamo.training.legacy_descriptions",
    "NodeProfile": "ort_dynamo.runtime.observe.node_profile",
    "ORTModule": "ort_dynamo.training.ortmodule",
    "ORTTrainer": "ort_dynamo.training.orttrainer",
    "ORTTrainerOptions": "ort_dynamo.training.orttrainer_options",
    "PropagateCastOpsStrategy": "ort_dynamo.options.cast_strategy",
    "RunStatistics": "ort_dynamo.statistics.run",
    "StatisticsComparison": "ort_dynamo.statistics.compare",
    "Summary": "ort_dynamo.report.summary",
    "TrainStepInfo": "ort_dynamo.training.train_step_info",
    "ValueDifference": "ort_dynamo.statistics.compare",
    "ValueStatistics": "ort_dynamo.statistics.values",
    "Verification": "ort_dynamo.verification.result",
    "amp": "ort_dynamo.training",
    "collect_statistics": "ort_dynamo.statistics.collect",
    "compare_statistics": "ort_dynamo.statistics.compare",
    "explain": "ort_dynamo.explanation.run",
    "export_training_graph": "ort_dynamo.training.training_graph",
    "load_statistics": "ort_dynamo.statistics.run",
    "memory_plan": "ort_dynamo.explanation.memory_plan",
    "optim": "ort_dynamo.training",
    "profile_nodes": "ort_dynamo.runtime.observe.node_profile",
    "register_lowering": "ort_dynamo.lowering.registry",
    "register_pass": "ort_dynamo.passes.outside",
    "require_compiled": "ort_dynamo.report.require",
    "summary": "ort_dynamo.report.summary",
    "verify": "ort_dynamo.verification.verify",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version("ort-dynamo")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__])
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
