"""Fused kernels: groups of ONNX nodes, the kernels that compute them, and the forms in which kernels are printed."""
