"""Graph-to-graph passes, usable without the backend: `ort_dynamo.passes.fx` and `ort_dynamo.passes.onnx`."""

if __name__ != "ort_dynamo.passes":
    # Imported by its folder name the modules would exist twice, and with them every registry.
    raise ImportError(f"import this package as ort_dynamo.passes, not as {__name__}")
