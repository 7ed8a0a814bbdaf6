"""Loss scalers of onnxruntime.training.amp, for mixed precision."""

from __future__ import annotations

from ort_dynamo.training.amp.loss_scaler import DynamicLossScaler, LossScaler

__all__ = ["DynamicLossScaler", "LossScaler"]
