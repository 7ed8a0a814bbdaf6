"""PyTorch training on ONNX Runtime: torch.compile(model, backend="ort_train").

The backend registers itself by entry point; importing this package is not needed to use it.
"""
