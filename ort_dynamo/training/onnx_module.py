"""The import path of `ort_dynamo.onnx_module` in older programs."""

from __future__ import annotations

from ort_dynamo.onnx_module import OnnxModule, to_model_proto

__all__ = ["OnnxModule", "to_model_proto"]
