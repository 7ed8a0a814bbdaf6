"""Names of ATen computations in a memory plan: ONNX's or ONNX Runtime's word where there is one."""

from __future__ import annotations

import operator

from torch.fx import Node

from ort_dynamo.passes.fx.analysis.saved_tensors import calls, is_random
from ort_dynamo.passes.fx.analysis.views import is_view
from ort_dynamo.torch_internals.kernels.operators import aten

__all__ = ["NAMES", "names_of"]

NAMES: dict[str, tuple[str, ...]] = {
    "Add": ("add",),
    "And": ("logical_and", "bitwise_and"),
    "ArgMax": ("argmax",),
    "ArgMin": ("argmin",),
    "Attention": (
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
        "scaled_dot_product_attention",
    ),
    "AveragePool": ("avg_pool1d", "avg_pool2d", "avg_pool3d"),
    "BatchNormalization": (
        "native_batch_norm",
        "cudnn_batch_norm",
        "_native_batch_norm_legit",
        "_native_batch_norm_legit_functional",
        "_native_batch_norm_legit_no_training",
        "_batch_norm_with_update_functional",
    ),
    "Cast": ("_to_copy", "convert_element_type"),
    "Clip": ("clamp", "clamp_min", "clamp_max", "hardtanh"),
    "Concat": ("cat",),
    "Constant": ("scalar_tensor", "lift_fresh_copy"),
    "ConstantOfShape": (
        *("full", "zeros", "ones", "full_like", "zeros_like", "ones_like", "new_full", "new_zeros", "new_ones"),
    ),
    "Conv": ("convolution", "_convolution"),
    "CumSum": ("cumsum",),
    "Dropout": ("native_dropout",),
    "Equal": ("eq",),
    "Expand": ("expand",),
    "Gather": ("embedding", "index_select"),
    "GatherElements": ("gather",),
    "Gemm": ("addmm",),
    "Greater": ("gt",),
    "GreaterOrEqual": ("ge",),
    "GroupNormalization": ("native_group_norm",),
    "Identity": ("clone",),
    "LayerNormalization": ("native_layer_norm",),
    "Less": ("lt",),
    "LessOrEqual": ("le",),
    "LogSoftmax": ("_log_softmax",),
    "MatMul": ("mm", "bmm", "matmul", "mv", "dot"),
    "Max": ("maximum",),
    "MaxPool": ("max_pool2d_with_indices", "max_pool3d_with_indices"),
    "Min": ("minimum",),
    "NegativeLogLikelihoodLoss": ("nll_loss_forward", "nll_loss2d_forward"),
    "Not": ("logical_not", "bitwise_not"),
    "Or": ("logical_or", "bitwise_or"),
    "Pad": ("constant_pad_nd", "reflection_pad1d", "reflection_pad2d", "replication_pad1d", "replication_pad2d"),
    "Range": ("arange",),
    "ReduceMax": ("amax", "max"),
    "ReduceMean": ("mean",),
    "ReduceMin": ("amin", "min"),
    "ReduceProd": ("prod",),
    "ReduceSum": ("sum",),
    "Reshape": ("view", "_unsafe_view", "reshape"),
    "Resize": (
        "upsample_nearest1d",
        "upsample_nearest2d",
        "upsample_nearest3d",
        "upsample_linear1d",
        "upsample_bilinear2d",
        "upsample_trilinear3d",
        "upsample_bicubic2d",
    ),
    "ScatterElements": ("scatter", "scatter_add", "scatter_reduce"),
    "SimplifiedLayerNormalization": ("_fused_rms_norm", "rms_norm"),
    "Softmax": ("_softmax", "_safe_softmax"),
    "Swish": ("silu",),
    "Tile": ("repeat",),
    "TopK": ("topk",),
    "Transpose": ("permute", "transpose", "t"),
    "Trilu": ("tril", "triu"),
    "Xor": ("logical_xor", "bitwise_xor"),
}
"""Name in a plan -> the ATen operators with that name. All others are called by their own in CamelCase (Exp, Rsqrt)."""

_NAME = {aten_name: name for name, aten_names in NAMES.items() for aten_name in aten_names}


def names_of(nodes: tuple[Node, ...]) -> list[str]:
    """Return the names of the computations among `nodes`, in order.

    Views cost nothing and have no name, unless there is nothing else. A dropout has one name, although hoist_random
    replaces it by a random mask, a cast, a scaling and a multiplication.
    """
    noise = {part for node in nodes for part in _noise(node)}
    computed = [node for node in nodes if not is_view(node) and node not in noise]
    return ["Dropout" if _noise(node) else _name(node) for node in computed or nodes]


def _name(node: Node) -> str:
    packet = getattr(node.target, "overloadpacket", None)
    own = packet.__name__ if packet is not None else getattr(node.target, "__name__", str(node.target))
    return _NAME.get(own) or "".join(part[:1].upper() + part[1:] for part in own.split("_"))


def _noise(node: Node) -> tuple[Node, ...]:
    """Return the scaling and the cast of the random mask if `node` is the multiplication of a dropout, else nothing."""
    if calls(node, (aten.mul,)):
        for scaled in node.all_input_nodes:
            if calls(scaled, (aten.div,)) and calls(cast := scaled.all_input_nodes[0], (aten._to_copy,)):
                mask = cast.all_input_nodes[0]
                if mask.target is operator.getitem:
                    mask = mask.all_input_nodes[0]
                if is_random(mask):
                    return scaled, cast
    return ()
