"""The old import path of `register_gradient`."""

from __future__ import annotations

from ort_dynamo.training.ortmodule.custom_gradients import register_gradient

__all__ = ["register_gradient"]
