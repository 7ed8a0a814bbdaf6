"""Analyses of an onnx_ir.Model that passes share, and the edit that all of them make."""
