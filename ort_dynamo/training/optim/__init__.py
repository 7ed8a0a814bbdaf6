"""Optimizers under their ONNX Runtime names."""
