"""Operators that torch has a kernel or two for, and a session many nodes, where a node is a launch: on a GPU.

On a GPU an elementwise kernel takes the time of its memory traffic, or of a launch. `targets/prices.py` has both,
and the work that each of torch's kernels saves.
"""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from ort_dynamo.passes.fx.torch_graph.count_multiplications import example_elements
from ort_dynamo.targets.prices import KernelPrices
from ort_dynamo.torch_internals.kernels.operators import aten

__all__ = ["ATTENTION", "saved"]


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
