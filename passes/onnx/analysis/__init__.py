"""What passes on onnx_ir.Model ask about a model."""
