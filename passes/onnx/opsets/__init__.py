"""What ONNX's operators were in older opsets, and how what came later is said there."""
