"""The installed build of ONNX Runtime: its capabilities, providers and known defects."""
