"""Rewrite ONNX's operators for older opsets."""
