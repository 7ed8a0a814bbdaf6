"""These passes rewrite an onnx_ir.Model, after lowering."""

from ort_dynamo.passes.onnx.cast_propagation.propagate_casts import CastSummary, PropagateCasts
from ort_dynamo.passes.onnx.expand_short_runs import ExpandShortRuns
from ort_dynamo.passes.onnx.fold_casts import FoldCasts
from ort_dynamo.passes.onnx.fuse_cross_entropy_gradient import FuseCrossEntropyGradient
from ort_dynamo.passes.onnx.fuse_row_sum import FuseRowSum
from ort_dynamo.passes.onnx.join_pads import JoinPads
from ort_dynamo.passes.onnx.lower_opset import LowerOpset
from ort_dynamo.passes.onnx.merge_transposes import MergeTransposes
from ort_dynamo.passes.onnx.multiply_small_matrices import MultiplySmallMatrices
from ort_dynamo.passes.onnx.remove_round_trips import RemoveRoundTrips
from ort_dynamo.passes.onnx.remove_unread_nodes import RemoveUnreadNodes
from ort_dynamo.passes.onnx.restore_order import RestoreOrder
from ort_dynamo.passes.onnx.separate_outputs import SeparateOutputs
from ort_dynamo.passes.onnx.sink_reads import SinkReads
from ort_dynamo.passes.onnx.sum_small_blocks import SumSmallBlocks
from ort_dynamo.passes.onnx.take_shapes_early import TakeShapesEarly
from ort_dynamo.passes.onnx.transpose_once import TransposeOnce

__all__ = [
    "CastSummary",
    "ExpandShortRuns",
    "FoldCasts",
    "FuseCrossEntropyGradient",
    "FuseRowSum",
    "JoinPads",
    "LowerOpset",
    "MergeTransposes",
    "MultiplySmallMatrices",
    "PropagateCasts",
    "RemoveRoundTrips",
    "RemoveUnreadNodes",
    "RestoreOrder",
    "SeparateOutputs",
    "SinkReads",
    "SumSmallBlocks",
    "TakeShapesEarly",
    "TransposeOnce",
]
