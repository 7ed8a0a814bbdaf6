"""ORTModule, ORTTrainer and their companions: the interface of onnxruntime.training."""

from __future__ import annotations

from ort_dynamo import PropagateCastOpsStrategy
from ort_dynamo.training import amp, checkpoint, model_desc_validation, optim
from ort_dynamo.training.legacy_descriptions import IODescription, ModelDescription
from ort_dynamo.training.ortmodule import ORTModule
from ort_dynamo.training.orttrainer import ORTTrainer
from ort_dynamo.training.orttrainer_options import ORTTrainerOptions
from ort_dynamo.training.train_step_info import TrainStepInfo

__all__ = [
    "IODescription",
    "ModelDescription",
    "ORTModule",
    "ORTTrainer",
    "ORTTrainerOptions",
    "PropagateCastOpsStrategy",
    "TrainStepInfo",
    "amp",
    "checkpoint",
    "is_ortmodule_available",
    "model_desc_validation",
    "optim",
]


def is_ortmodule_available() -> bool:
    """Check whether ORTModule can be used: always, as it needs no build of its own."""
    return True
