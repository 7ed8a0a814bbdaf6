"""Half a graph, cut into islands for ONNX Runtime and nodes that torch runs."""
