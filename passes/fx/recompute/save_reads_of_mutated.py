"""Save results that are computed from a mutated tensor: a recompute would see the write."""

from __future__ import annotations

import operator
from dataclasses import dataclass

from torch.fx import GraphModule
from torch.fx.passes.infra.pass_base import PassBase, PassResult
from torch.utils.checkpoint import CheckpointPolicy

from ort_dynamo.passes.fx.analysis.mutation import mutated_storages
from ort_dynamo.passes.fx.analysis.saved_tensors import JointGraph, tag
from ort_dynamo.passes.fx.analysis.storage import storages_of
from ort_dynamo.passes.fx.analysis.views import is_view
from ort_dynamo.passes.ordering import Condition, ordering
from ort_dynamo.torch_internals.kernels.operators import aten

__all__ = ["SaveReadsOfMutated"]


@ordering(needs=[Condition.AS_TRACED], gives=[Condition.READS_OF_MUTATED_SAVED])
@dataclass(frozen=True)
class SaveReadsOfMutated(PassBase):
    """Tag MUST_SAVE on the readers of an input that the forward writes to at its end, usually a buffer.

    AOTAutograd copies such an input if gradients read it directly. It does not know which nodes will be recomputed. A
    recomputation would need the saved input, and autograd would raise because it has changed. The tag overrides
    torch.utils.checkpoint, which fails in this case.

    BatchNorm with running statistics is left out: the results that the backward reads do not depend on them
    (split_statistics.py).
    """

    name: str = "save_reads_of_mutated"

    def call(self, graph_module: GraphModule) -> PassResult:
        """Tag nodes of a joint graph, in place."""
        mutated = mutated_storages(graph_module)
        reads = [
            node
            for node in JointGraph(graph_module).forward
            if node.target is not aten._native_batch_norm_legit_functional.default
            and not is_view(node)
            and any(storages_of(argument) & mutated for argument in node.all_input_nodes)
        ]
        results = [user for node in reads for user in node.users if user.target is operator.getitem]
        return PassResult(graph_module, tag([*reads, *results], CheckpointPolicy.MUST_SAVE, self.name))
