"""What onnxruntime.training.utils has for users: hooks that look at activations, and samplers of data."""
