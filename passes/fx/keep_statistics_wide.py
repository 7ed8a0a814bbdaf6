"""What a normalization of a narrow tensor hands to its gradient stays in the wide type it was computed in."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassBase, PassResult

__all__ = ["KeepStatisticsWide"]

aten = torch.ops.aten

_STATISTICS = {
    aten._native_batch_norm_legit_functional.default: (1, 2),
    aten._native_batch_norm_legit.no_stats: (1, 2),
    aten._native_batch_norm_legit_no_training.default: (1, 2),
    aten.native_batch_norm.default: (1, 2),
    aten._batch_norm_with_update_functional.default: (1, 2),
    aten._batch_norm_no_update.default: (1, 2),
    aten.native_layer_norm.default: (1, 2),
    aten.native_group_norm.default: (1, 2),
    aten._fused_rms_norm.default: (1,),
}
"""Normalization -> the outputs that are a mean or a reciprocal deviation."""

_GRADIENTS = frozenset(
    {
        aten.native_batch_norm_backward.default,
        aten.batch_norm_backward.default,
        aten.native_layer_norm_backward.default,
        aten.native_group_norm_backward.default,
        aten._fused_rms_norm_backward.default,
    }
)

_ALIASES = (aten.detach.default, aten.alias.default)

_NARROW = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class KeepStatisticsWide(PassBase):
    """float16 and bfloat16 statistics that gradients of normalizations alone read become float32.

    torch's kernels compute and keep them in float32 where the parameters are, as under autocast, but its traced graphs
    say on the CPU that they have the input's dtype. Rounded so, a mean is off by 2⁻⁹ of itself, and in the gradient the
    deviations from it no longer cancel. They are one number a channel or row, against a tensor kept beside them.
    """

    name: str = "keep_statistics_wide"

    def call(self, graph_module: GraphModule) -> PassResult:
        """Change the fake values of a joint graph, from which lowerings take their dtypes."""
        modified = False
        for node in graph_module.graph.nodes:
            for result in node.users if node.target in _STATISTICS else ():
                if result.args[1] in _STATISTICS[node.target] and result.meta["val"].dtype in _NARROW:
                    modified |= _widen(node, result)
        return PassResult(graph_module, modified)


def _widen(node: Node, result: Node) -> bool:
    """Make one result of a normalization float32, with its aliases, if gradients of normalizations alone read it."""
    aliases = [result]
    for alias in aliases:
        for reader in alias.users:
            if reader.target in _ALIASES:
                aliases.append(reader)
            elif reader.target not in _GRADIENTS:
                return False
    for alias in aliases:
        alias.meta["val"] = alias.meta["val"].to(torch.float32)
    index = result.args[1]
    node.meta["val"] = tuple(result.meta["val"] if i == index else fake for i, fake in enumerate(node.meta["val"]))
    return True
