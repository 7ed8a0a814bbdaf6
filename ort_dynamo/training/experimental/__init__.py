"""What onnxruntime.training.experimental has: the export of a model's gradients."""

from __future__ import annotations

from ort_dynamo.training.experimental.gradient_graph import export_gradient_graph

__all__ = ["export_gradient_graph"]
