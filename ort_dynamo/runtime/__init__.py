"""ONNX Runtime: the installed build, the provider that serves a device, sessions and how tensors reach them."""
