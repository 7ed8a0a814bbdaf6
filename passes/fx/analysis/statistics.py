"""Statistics that normalizations and attention hand to their gradients: the one table."""

from __future__ import annotations

from torch.fx import Node

from ort_dynamo.torch_internals.kernels.operators import aten
from ort_dynamo.torch_internals.kernels.view_operators import ALIASES

__all__ = ["STATISTICS", "gradients_reading", "normalizes"]

STATISTICS = {
    aten._native_batch_norm_legit_functional.default: (1, 2),
    aten._native_batch_norm_legit.no_stats: (1, 2),
    aten._native_batch_norm_legit_no_training.default: (1, 2),
    aten.native_batch_norm.default: (1, 2),
    aten._batch_norm_with_update_functional.default: (1, 2),
    aten._batch_norm_no_update.default: (1, 2),
    aten.native_layer_norm.default: (1, 2),
    aten.native_group_norm.default: (1, 2),
    aten._fused_rms_norm.default: (1,),
    aten._scaled_dot_product_flash_attention_for_cpu.default: (1,),
}
"""Operator -> the outputs that are a mean, a reciprocal deviation or a logarithm of a sum of exponentials."""

_GRADIENTS = frozenset(
    {
        aten.native_batch_norm_backward.default,
        aten.batch_norm_backward.default,
        aten.native_layer_norm_backward.default,
        aten.native_group_norm_backward.default,
        aten._fused_rms_norm_backward.default,
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    }
)


def normalizes(node: Node) -> bool:
    """Check whether a node is a batch, layer or group normalization, whose kernels take parameters of a wider dtype."""
    return node.target in STATISTICS and "_norm" in str(node.target) and "rms" not in str(node.target)


def gradients_reading(result: Node) -> tuple[list[Node], list[tuple[Node, Node]], bool]:
    """Find the readers of one statistic.

    Returns:
        The statistic and its aliases; the gradients that read it, each with the alias that it reads; and whether
        nothing else reads it.
    """
    aliases, gradients, alone = [result], [], True
    for alias in aliases:
        for reader in alias.users:
            if reader.target in ALIASES:
                aliases.append(reader)
            elif reader.target in _GRADIENTS:
                gradients.append((reader, alias))
            else:
                alone = False
    return aliases, gradients, alone
