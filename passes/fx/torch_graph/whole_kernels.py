"""What torch has a kernel or two for, and a session many nodes: how much that saves where a node is a launch.

Counted, not measured: nodes of our lowerings for CUDA, and how often they read or write what they are of, less what
torch's kernels do. On a GPU an elementwise kernel takes the time that its memory takes, or that of a launch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from ort_dynamo.passes.fx.torch_graph.work import example_elements
from ort_dynamo.torch_internals.operators import OpOverload, aten

__all__ = ["ATTENTION", "NORMALIZATIONS", "WholeKernel", "saved"]

LAUNCH = 4.0
"""Microseconds that a small kernel takes."""

RATE = 1.5e6
"""Bytes that a kernel reads or writes in a microsecond."""

WIDTH = 4
"""Bytes of an element: our nodes compute in float32."""


@dataclass(frozen=True)
class WholeKernel:
    """A row: what torch's kernel saves.

    Attributes:
        launches: how many fewer kernels run.
        passes: how many times fewer all elements are read or written.
        elements: how many that are, of a node.
    """

    launches: int
    passes: int
    elements: Callable[[Node], int]


def saved(node: Node, row: WholeKernel) -> float:
    """Estimate the microseconds that torch's kernel saves, by the example's sizes."""
    return row.launches * LAUNCH + row.passes * row.elements(node) * WIDTH / RATE


def _of(place: int) -> Callable[[Node], int]:
    """The elements of an argument."""

    def elements(node: Node) -> int:
        argument: Any = node.args[place]
        return example_elements(argument.meta["val"])

    return elements


_BATCH_NORM, _BATCH_NORM_GRADIENT = WholeKernel(16, 6, _of(0)), WholeKernel(14, 10, _of(0))
_GROUP_NORM_GRADIENT, _LAYER_NORM_GRADIENT = WholeKernel(18, 11, _of(0)), WholeKernel(10, 19, _of(0))

NORMALIZATIONS: dict[OpOverload, WholeKernel] = {
    aten._native_batch_norm_legit_functional.default: _BATCH_NORM,
    aten._native_batch_norm_legit.no_stats: _BATCH_NORM,
    aten._batch_norm_with_update_functional.default: _BATCH_NORM,
    aten.native_batch_norm_backward.default: _BATCH_NORM_GRADIENT,
    aten.batch_norm_backward.default: _BATCH_NORM_GRADIENT,
    aten.native_group_norm.default: WholeKernel(10, 8, _of(0)),
    aten.native_group_norm_backward.default: _GROUP_NORM_GRADIENT,
    aten.native_layer_norm_backward.default: _LAYER_NORM_GRADIENT,
    aten._fused_rms_norm_backward.default: WholeKernel(7, 14, _of(0)),
}
"""LayerNormalization hands out mean and deviation itself: a layer norm's forward is one kernel in a session, too."""

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
"""Whatever the size: the gradient reads the state of a generator that torch's forward gives, and no session can."""
