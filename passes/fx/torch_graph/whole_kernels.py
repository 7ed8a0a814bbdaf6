"""Operators that torch has a kernel or two for, and a session many nodes, where a node is a launch: on a GPU.

On a GPU an elementwise kernel takes the time of its memory traffic, or of a launch. `targets/prices.py` has both,
and the work that each of torch's kernels saves.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Node

from ort_dynamo.passes.fx.analysis.saved_tensors import cast_source
from ort_dynamo.passes.fx.analysis.views import is_expanded
from ort_dynamo.passes.fx.torch_graph.count_multiplications import example_elements, example_sizes
from ort_dynamo.passes.fx.torch_graph.images import CAST_ARGUMENTS, is_known
from ort_dynamo.targets.prices import KernelPrices
from ort_dynamo.torch_internals.fakes import fakes_around
from ort_dynamo.torch_internals.kernels.operators import OpOverload, aten, named_arguments

__all__ = [
    "ATTENTION",
    "FOREACH",
    "adds_rows",
    "is_count",
    "is_plain_cast",
    "repeats",
    "saved",
    "sorts_long_rows",
]


def saved(node: Node, prices: KernelPrices) -> float:
    """Estimate the microseconds that torch's kernel saves for a node of `prices.normalizations`.

    The example's sizes count: all elements of the first argument, an image or the gradient of one.
    """
    work = prices.normalizations[node.target]  # type: ignore[index]
    normalized: Any = node.args[0]
    nbytes = example_elements(normalized.meta["val"]) * prices.width
    return work.launches * prices.launch + work.passes * nbytes / prices.rate


ATTENTION = frozenset(
    {
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_flash_attention_backward.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_efficient_attention_backward.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_cudnn_attention_backward.default,
    }
)
"""Fused attention, of any size: its gradient reads the state of a generator that torch's forward gives, and no
session can."""

_LOOPED = frozenset({
    "aten._grouped_mm", "aten.gcd", "aten.igamma", "aten.igammac", "aten.lcm", "aten.special_zeta",
    "transformers.grouped_mm_fallback", "transformers.grouped_mm_fallback_backward",
    *(f"aten.special_{name}_polynomial_{kind}" for name, kinds in (
        ("chebyshev", "tuvw"), ("hermite", ("h", "he")), ("laguerre", "l"), ("legendre", "p"),
        ("shifted_chebyshev", "tuvw"),
    ) for kind in kinds),
})  # fmt: skip
"""Operators whose lowering is a Loop, for any arguments: the host waits for the device before each round."""


_LOOPED_IF_SYMBOLIC = frozenset({
    "aten.bucketize", "aten.cummax", "aten.cummin", "aten.cumprod", "aten.logcumsumexp", "aten.mode",
    "aten.searchsorted",
})  # fmt: skip
"""Those whose lowering is a Loop where a size varies."""


def _operator(node: Node) -> str:
    """Return the name of an operator without its overload, such as "aten.sort"."""
    return str(node.target).rpartition(".")[0]


def repeats(node: Node) -> bool:
    """Check whether a session would compute a node in a Loop, whose rounds depend on data, on groups or on a size."""
    name = _operator(node)
    if name in _LOOPED_IF_SYMBOLIC:
        return any(isinstance(size, torch.SymInt) for fake in fakes_around(node) for size in fake.shape)
    if name != "aten.pow" or not isinstance(node.target, OpOverload):
        return name in _LOOPED
    exponent, power = named_arguments(node.target, node.args, node.kwargs)["exponent"], node.meta["val"]
    return isinstance(exponent, Node) and not (power.is_floating_point() or power.is_complex())


_SORTS = frozenset({"aten.kthvalue", "aten.median", "aten.nanmedian", "aten.sort", "aten.topk"})

_LONG_ROW = 4096
"""The longest row that one kernel of ONNX Runtime's TopK sorts; of longer ones, it sorts one after another."""


def sorts_long_rows(node: Node) -> bool:
    """Check whether a node sorts rows that TopK of CUDA sorts one after another, by the example's sizes."""
    if not isinstance(node.target, OpOverload) or _operator(node) not in _SORTS:
        return False
    given = named_arguments(node.target, node.args, node.kwargs)
    sizes = example_sizes(given["self"].meta["val"])
    row = sizes[given["dim"]] if sizes and "dim" in given else math.prod(sizes)
    return row > _LONG_ROW


def _reads_expanded(node: Node) -> bool:
    """Check whether a node reads an index of which each entry stands for several."""
    index = named_arguments(node.target, node.args, node.kwargs)["index"].meta["val"]  # type: ignore[arg-type]
    return any(is_expanded(index, axis) for axis in range(index.dim()))


_SCATTERS = frozenset({"aten.index_add", "aten.index_reduce", "aten.scatter_add", "aten.scatter_reduce"})


def adds_rows(node: Node, *, deterministic: bool) -> bool:
    """Check whether a node adds floats to the places of indices, as the gradients of lookups do.

    torch's kernels for the other such operators are deterministic, or raise, only if torch is asked to be. They read
    an expanded index where it is; a session is fed an int64 for each entry.
    """
    if node.target is aten.embedding_dense_backward.default:
        return True
    if not isinstance(node.target, OpOverload) or not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    if node.target in (aten.index_put.default, aten._unsafe_index_put.default):
        adds = bool(named_arguments(node.target, node.args, node.kwargs)["accumulate"])
    else:
        adds = _operator(node) in _SCATTERS and (deterministic or _reads_expanded(node))
    return adds and (node.meta["val"].is_floating_point() or node.meta["val"].is_complex())


FOREACH = "torch computes many tensors in one kernel"
"""The reason of nodes that become part of such a call."""


def is_plain_cast(node: Node) -> bool:
    """Check whether a node changes the type of a floating tensor, neither its device nor its strides."""
    if node.target is not aten._to_copy.default or not node.kwargs.keys() <= CAST_ARGUMENTS:
        return False
    source = cast_source(node)
    if source is None:
        return False
    given, result = source.meta["val"], node.meta["val"]
    if not (given.dtype.is_floating_point and result.dtype.is_floating_point and given.layout is torch.strided):
        return False
    is_same = (given.device, given.layout, given.stride()) == (result.device, result.layout, result.stride())
    return is_same and is_known(given)


def is_count(node: Node) -> bool:
    """Check whether a node adds a scalar to an int64 input of one element."""
    if node.target is not aten.add.Tensor or node.kwargs or not isinstance(node.args[1], int):
        return False
    source: Any = node.args[0]
    fake = source.meta["val"]
    return source.op == "placeholder" and fake.dim() == 0 and fake.dtype == torch.int64
