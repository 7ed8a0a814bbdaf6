"""Passes on onnx_ir.Model, after lowering."""
