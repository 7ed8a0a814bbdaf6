"""ATen to ONNX: registry, context, walk, and the lowerings by family."""
