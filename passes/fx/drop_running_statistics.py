"""Drop the running statistics from BatchNorm's gradient in training, which does not read them."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import GraphModule
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from ort_dynamo.torch_internals.kernels.operators import aten

__all__ = ["DropRunningStatistics"]

_MEAN, _VARIANCE, _TRAINING = 3, 4, 7
"""Indices of native_batch_norm_backward's arguments."""


@dataclass(frozen=True)
class DropRunningStatistics(PassBase):
    """`native_batch_norm_backward(..., mean, variance, ..., True, ...)` gets None in place of both.

    In training the gradient is that of the batch's statistics. As arguments, the running ones would be saved for the
    backward, and could not be told from something that it needs.
    """

    name: str = "drop_running_statistics"

    def call(self, graph_module: GraphModule) -> PassResult:
        """Rewrite a joint graph in place."""
        modified = False
        target = aten.native_batch_norm_backward.default
        for node in graph_module.graph.find_nodes(op="call_function", target=target):
            if node.args[_TRAINING] is True:
                for index in (_MEAN, _VARIANCE):
                    modified |= node.args[index] is not None
                    node.update_arg(index, None)
        if modified:
            graph_module.recompile()
        return PassResult(graph_module, modified)
