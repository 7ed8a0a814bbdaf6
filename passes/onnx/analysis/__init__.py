"""What passes on onnx_ir.Model share: what they ask about a model, and the edit that each of them makes."""
