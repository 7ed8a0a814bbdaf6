"""A forward, backward or inference graph, cut into islands for ONNX Runtime and nodes that torch runs."""
