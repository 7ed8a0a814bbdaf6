"""Remove copies and aliases that a functional graph does not need."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import GraphModule
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from ort_dynamo.passes.fx.analysis.aliases import AliasSets, seen_by_outputs
from ort_dynamo.passes.fx.analysis.storage import are_laid_out_alike
from ort_dynamo.passes.fx.analysis.storage_places import reads_by_place
from ort_dynamo.torch_internals.kernels.operators import aten
from ort_dynamo.torch_internals.kernels.view_operators import ALIASES

__all__ = ["RemoveNoOps"]

_NO_OPS = (aten.clone.default, *ALIASES)


@dataclass(frozen=True)
class RemoveNoOps(PassBase):
    """Replace `clone(x)`, `detach(x)` and `alias(x)` by `x`, where x is computed and no caller can tell.

    1. `clone`, where the copy has x's strides, and x's place in its storage if the graph has an `as_strided`. The graph
       is functional, so no node writes to the copy. A caller may write to an output, and AOTAutograd copies an input
       that the program writes to after the forward. So both the copy and x must be private: neither aliases an input
       or an output.
    2. `detach`, which torch 2.15 traces as `alias`. It is x to all but autograd, and autograd has seen the graph.
       The gradients of tanh and others read their own result so, which would be saved twice, under two names.
    """

    name: str = "remove_no_ops"

    def call(self, graph_module: GraphModule) -> PassResult:
        """Rewrite `graph_module` in place."""
        graph = graph_module.graph
        aliases, seen = AliasSets(graph), seen_by_outputs(graph)
        by_place = reads_by_place(graph)
        modified = False
        for node in [node for target in _NO_OPS for node in graph.find_nodes(op="call_function", target=target)]:
            source = node.args[0]
            if not are_laid_out_alike(source.meta["val"], node.meta["val"], by_place=by_place):
                continue
            if node.target in ALIASES:
                unseen = not aliases.is_given(source) and node not in seen
            else:
                unseen = aliases.may_merge(node, source)
            if unseen:
                aliases.join(node, source)
                node.replace_all_uses_with(source)
                graph.erase_node(node)
                modified = True
        if modified:
            graph_module.recompile()
        return PassResult(graph_module, modified)
