"""Attention without dropout loses ATen's tag for random operators while torch partitions the graph."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import GraphModule
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from ort_dynamo.passes.fx.analysis.saved_tensors import is_random
from ort_dynamo.passes.fx.analysis.untagged_operators import stand_in
from ort_dynamo.passes.ordering import Condition, ordering

__all__ = ["HideSeedless"]


@ordering(gives=[Condition.SEEDLESS_HIDDEN])
@dataclass(frozen=True)
class HideSeedless(PassBase):
    """Replace each operator that is tagged as random, but has no dropout, by a function without tags.

    If torch's partitioner recomputes an operator with this tag, it saves and loads the generator's state and calls the
    operator through a higher-order operator, which no session can run. RestoreSeedless puts the operators back.
    """

    name: str = "hide_seedless"

    def call(self, graph_module: GraphModule) -> PassResult:
        """Rewrite a joint graph in place."""
        modified = False
        for node in graph_module.graph.nodes:
            if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) and not is_random(node):
                node.target = stand_in(node.target)
                modified = True
        if modified:
            graph_module.recompile()
        return PassResult(graph_module, modified)
