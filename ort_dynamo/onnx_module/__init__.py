"""Models in ONNX as torch modules that can be trained, and back."""

from __future__ import annotations

from ort_dynamo.onnx_module.module import OnnxModule, to_model_proto

__all__ = ["OnnxModule", "to_model_proto"]
