"""Optimizers, configurations of ORTTrainer's optimizers, and its schedulers: onnxruntime.training.optim."""

from __future__ import annotations

from ort_dynamo.training.optim.config import AdamConfig, LambConfig, SGDConfig
from ort_dynamo.training.optim.config import _OptimizerConfig as _OptimizerConfig
from ort_dynamo.training.optim.fp16_optimizer import FP16_Optimizer
from ort_dynamo.training.optim.fused_adam import AdamWMode, FusedAdam
from ort_dynamo.training.optim.lr_scheduler import (
    ConstantWarmupLRScheduler,
    CosineWarmupLRScheduler,
    LinearWarmupLRScheduler,
    PolyWarmupLRScheduler,
)
from ort_dynamo.training.optim.lr_scheduler import _LRScheduler as _LRScheduler

__all__ = [
    "AdamConfig",
    "AdamWMode",
    "ConstantWarmupLRScheduler",
    "CosineWarmupLRScheduler",
    "FP16_Optimizer",
    "FusedAdam",
    "LambConfig",
    "LinearWarmupLRScheduler",
    "PolyWarmupLRScheduler",
    "SGDConfig",
]
