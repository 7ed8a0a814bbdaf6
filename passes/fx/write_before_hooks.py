"""Write buffers before a hook gets the saved tensors: it may raise, and AOTAutograd writes them only afterwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from ort_dynamo.passes.ordering import ordering
from ort_dynamo.torch_internals.autograd import saves_by_hooks
from ort_dynamo.torch_internals.fakes import storage_identity

__all__ = ["WriteBeforeHooks", "write_before_hooks"]


def write_before_hooks(
    inputs: Sequence[torch.Tensor], results: Sequence[torch.Tensor], saved: Sequence[torch.Tensor]
) -> None:
    """Copy each result to its input if the calling thread saves tensors by a hook, but not to an input that is saved.

    Args:
        inputs: tensors that need no gradient.
        results: a tensor for each input, of the same shape and dtype.
        saved: the tensors that the hook will get.
    """
    if not saves_by_hooks():
        return
    kept = set(map(storage_identity, saved))
    with torch.no_grad():
        for written, result in zip(inputs, results, strict=True):
            if storage_identity(written) not in kept:
                written.copy_(result)


@ordering()
@dataclass(frozen=True)
class WriteBeforeHooks(PassBase):
    """End a forward with `write_before_hooks`.

    `torch.utils.checkpoint` without re-entry stops its recomputation by an error in such a hook. Eager has written the
    buffers by then. AOTAutograd writes them when the tensors are saved, which this call does not change.

    Args:
        written: index of an output -> index of the input that it is written to.
        saved: which outputs are saved tensors.
    """

    written: Mapping[int, int]
    saved: slice
    name: str = "write_before_hooks"

    def call(self, graph_module: GraphModule) -> PassResult:
        """Rewrite an outer graph in place."""
        graph = graph_module.graph
        (output,) = graph.find_nodes(op="output")
        values: tuple[Any, ...] = output.args[0]
        if not self.written or graph.find_nodes(op="call_function", target=write_before_hooks):
            return PassResult(graph_module, False)
        placeholders = graph.find_nodes(op="placeholder")
        inputs, results = [placeholders[place] for place in self.written.values()], [values[i] for i in self.written]
        saved = [one for one in values[self.saved] if isinstance(one, Node) and _is_tensor(one)]
        with graph.inserting_before(output):
            graph.call_function(write_before_hooks, (inputs, results, saved))
        graph_module.recompile()
        return PassResult(graph_module, True)


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)
