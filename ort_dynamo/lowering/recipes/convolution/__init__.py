"""Convolutions: the form that an ATen convolution has in ONNX, and other ways to write one."""
