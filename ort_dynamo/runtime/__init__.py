"""ONNX Runtime: what is installed, which provider serves a device, sessions and how tensors reach them."""
