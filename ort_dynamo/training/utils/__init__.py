"""The parts of onnxruntime.training.utils for users: hooks that look at activations, and samplers of data."""
