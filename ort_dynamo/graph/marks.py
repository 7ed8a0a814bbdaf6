"""The words that this project writes on nodes, of FX graphs and of ONNX models, and the parts that read them."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = [
    "CHANNELS_LAST",
    "CHOSEN",
    "DECIDED_BY",
    "DIRECTION",
    "EMPTY",
    "FOR_KERNEL",
    "FX_NODE",
    "GATE",
    "HALF",
    "IGNORES_NAN",
    "KERNEL_READS",
    "LACKED_SYMBOLS",
    "NUMBER",
    "OBSERVERS",
    "PASS",
    "RANDOM",
    "READABLE",
    "READS_ROUNDED",
    "READS_WIDE_STATISTICS",
    "RECOMPUTE",
    "REFUSED",
    "RETURNED_STRIDES",
    "RETURNED_VIEWS",
    "SCOPE",
    "SECTION",
    "STANDS_BESIDE",
    "STOPS",
    "WHOLE_NODE",
    "WIDE_STATISTICS",
    "WRITTEN_BACK",
    "WRITTEN_FOR",
    "ZERO_DIVISOR",
    "fx_node_name",
]

# -- keys of an FX node's meta ---------------------------------------------------------------------------------

RECOMPUTE = "recompute"
"""torch's own: the CheckpointPolicy that both partitioners obey. torch.utils.checkpoint and passes of ours set it."""

HALF = "partitioner_tag"
"""torch's own: "is_forward" or "is_backward", by the part of the joint graph that the node was traced in."""

DECIDED_BY = "ort_dynamo.decided_by"
"""The name of the pass of ours that set RECOMPUTE; absent where torch.utils.checkpoint did."""

RANDOM = "ort_dynamo.random"
"""True on nodes that torch runs outside of sessions because they use torch's random generator."""

CHOSEN = "ort_dynamo.chosen"
"""On nodes that torch runs by choice, though a session could: the reason, as text."""

SECTION = "ort_dynamo.section"
"""On a backward's nodes: the number of the section that they belong to; absent where the backward is not cut."""

GATE = "ort_dynamo.gate"
"""True on a sigmoid that only scales other tensors: an absolute error of 1e-7 in it is rounding. In graph keys."""

IGNORES_NAN = "ort_dynamo.ignores_nan"
"""True on a maximum whose readers keep a NaN of its operand themselves, so that it may lose it. In graph keys."""

STANDS_BESIDE = "ort_dynamo.with_running_statistics"
"""On a BatchNorm without running statistics: the name of the one with them that it was split from."""

WIDE_STATISTICS = "ort_dynamo.wide_statistics"
"""On a normalization or an attention: index of a result -> the dtype that its kernel gives. Fake tensors differ."""

READS_WIDE_STATISTICS = "ort_dynamo.reads_wide_statistics"
"""On the gradient of one: index of such an argument -> the dtype by which fake tensors give the result's dtype."""

CHANNELS_LAST = "ort_dynamo.channels_last"
"""On an operator of images that torch runs: the indices of results that its kernel gives in channels_last.

Fake tensors of some operators are contiguous in any layout of their operands.
"""

KERNEL_READS = "ort_dynamo.kernel_reads"
"""On the gradient of one: index of such an argument -> the dtype that torch's kernel takes it in."""

LACKED_SYMBOLS = "ort_dynamo.lacked_symbols"
"""The size symbols around a node that no input of its graph and no node that torch runs has as a size by itself."""

WHOLE_NODE = "ort_dynamo.whole_node"
"""The name that the node has in the graph before this is cut into islands; copies in these and around them keep it."""

READABLE = "ort_dynamo.readable"
"""The name of the node's value in saved files; set only if files are saved."""

SCOPE = "ort_dynamo.scope"
"""The node's scope in saved files: the path of the innermost module, or the name of the traced function."""

# -- keys of a graph's meta and of a model's metadata_props ------------------------------------------------------

RETURNED_STRIDES = "ort_dynamo.returned_strides"
"""On a graph that is compiled: index of an output -> its strides in eager, where dimensions have one element."""

RETURNED_VIEWS = "ort_dynamo.returned_views"
"""On an inference or forward graph: the indices of its outputs that are views to eager, too."""

WRITTEN_BACK = "ort_dynamo.written_back"
"""On a forward graph: index of an output -> index of the input without gradient that AOTAutograd writes it to."""

WRITTEN_FOR = "ort_dynamo.written_for"
"""The program, compile, graph and island that a saved model's names are of; another island may share the model."""

# -- operators --------------------------------------------------------------------------------------------------

OBSERVERS = "ort_dynamo_observe"
"""Namespace of operators that return their input, and show it to the program; torch runs them by design."""

# -- keys of an ONNX node's metadata_props, which save_onnx writes to the file ---------------------------------

FX_NODE = "ort_dynamo.fx_node"
"""The FX node whose lowering made this node, and its target: "gelu_5: aten.gelu.default". `fx_node_name` reads it."""

PASS = "ort_dynamo.pass"
"""The repr of the pass that made this node or changed it."""

DIRECTION = "ort_dynamo.direction"
"""In saved files: "backward" of nodes that compute gradients, else "forward", also of recomputed ones in a backward."""

FOR_KERNEL = "ort_dynamo.for_kernel"
"""On a Cast: it only is there because an operator has no kernel for the dtype of its inputs."""

STOPS = "ort_dynamo.stops"
"""On a Where: a fused kernel stops where its condition holds, as torch's kernel does at such an index."""

READS_ROUNDED = "ort_dynamo.reads_rounded"
"""On a node that computes in a wider dtype: its inputs must be rounded to torch's dtype."""

# -- keys of an ONNX value's meta, which no file has ---------------------------------------------------------------

NUMBER = "ort_dynamo.number"
"""True on an input of a graph that is a Python number: a session is fed it on the host, on any device."""

# -- names of ONNX nodes, which ONNX Runtime repeats in its messages -------------------------------------------

ZERO_DIVISOR = "zero_divisor"
"""Name prefix of a node that fails where an integer is divided by zero."""

REFUSED = "refused"
"""Name prefix of a node that fails at data which eager's kernel refuses; eager's words follow ": "."""

EMPTY = "empty"
"""The same, of a reduction over no elements, at which eager raises an IndexError or a RuntimeError."""


def fx_node_name(metadata: Mapping[str, str]) -> str:
    """Return the name of the FX node whose lowering made an ONNX node, by its metadata_props; "" if none did."""
    return metadata.get(FX_NODE, "").partition(":")[0]
