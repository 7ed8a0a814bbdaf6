"""Passes on onnx_ir.Model, after lowering."""

from ort_dynamo.passes.onnx.fuse_row_sum import FuseRowSum
from ort_dynamo.passes.onnx.propagate_casts import CastSummary, PropagateCasts
from ort_dynamo.passes.onnx.separate_outputs import SeparateOutputs

__all__ = ["CastSummary", "FuseRowSum", "PropagateCasts", "SeparateOutputs"]
