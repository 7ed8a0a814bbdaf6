"""The forward saves what it computes from a tensor that is written to: recomputed, it would see the write."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassBase, PassResult
from torch.utils.checkpoint import CheckpointPolicy

from ort_dynamo.passes.fx.analysis.mutation import writes_input
from ort_dynamo.passes.fx.analysis.saved_tensors import JointGraph, tag
from ort_dynamo.passes.fx.analysis.storage import storage_of, storages_of
from ort_dynamo.passes.fx.analysis.views import is_view
from ort_dynamo.torch_internals.operators import aten

__all__ = ["SaveReadsOfMutated"]


@dataclass(frozen=True)
class SaveReadsOfMutated(PassBase):
    """The pass tags MUST_SAVE what reads an input that is written to when the forward has run: a buffer, mostly.

    AOTAutograd copies such an input where the gradients read it themselves. It does not know what will be
    computed again; a recomputation would keep the input, and autograd would find it changed. Takes precedence over
    torch.utils.checkpoint, which fails on it.

    BatchNorm with running statistics is left out: the results that the backward reads do not depend on them
    (split_statistics.py).
    """

    name: str = "save_reads_of_mutated"

    def call(self, graph_module: GraphModule) -> PassResult:
        """Tag nodes of a joint graph, in place."""
        mutated = {storage_of(node) for node in _mutated(graph_module)}
        reads = [
            node
            for node in JointGraph(graph_module).forward
            if node.target is not aten._native_batch_norm_legit_functional.default
            and not is_view(node)
            and any(storages_of(argument) & mutated for argument in node.all_input_nodes)
        ]
        results = [user for node in reads for user in node.users if user.target is operator.getitem]
        return PassResult(graph_module, tag([*reads, *results], CheckpointPolicy.MUST_SAVE, self.name))


def _mutated(gm: GraphModule) -> Iterator[Node]:
    """Yield the inputs that AOTAutograd writes to after the forward, as it describes outputs, or at the graph's end."""
    (output,) = gm.graph.find_nodes(op="output")
    written = [d.mutated_input for d in output.meta.get("desc", ()) if hasattr(d, "mutated_input")]
    for node in gm.graph.find_nodes(op="placeholder"):
        if node.meta.get("desc") in written and isinstance(node.meta.get("val"), torch.Tensor):
            yield node
    for node in gm.graph.nodes:
        if writes_input(node):
            yield node.args[0]
