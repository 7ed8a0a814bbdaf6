"""Optimizers of onnxruntime.training.optim."""

from __future__ import annotations

from ort_dynamo.training.optim.fp16_optimizer import FP16_Optimizer
from ort_dynamo.training.optim.fused_adam import AdamWMode, FusedAdam

__all__ = ["AdamWMode", "FP16_Optimizer", "FusedAdam"]
