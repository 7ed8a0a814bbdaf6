"""Give results that the program sees eager's strides of dimensions of one element."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from ort_dynamo.boundary import physical_order
from ort_dynamo.passes.fx.analysis.eager_strides import has_dimension_of_one
from ort_dynamo.torch_internals.iterator_strides import contiguous_strides

__all__ = ["GiveStrides", "strided"]


def strided(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Return `tensor` in its memory, with `strides` in the dimensions of one element."""
    if tensor.stride() == strides:
        return tensor
    own = zip(tensor.shape, tensor.stride(), strides, strict=True)
    return tensor.as_strided(tensor.shape, [given if size == 1 else stride for size, stride, given in own])


strided.keeps_value = True  # type: ignore[attr-defined]  # the maker gives the fake value


@dataclass(frozen=True)
class GiveStrides(PassBase):
    """Pass outputs through `strided`, which moves no data. Such a stride is metadata, and a session has none.

    Where eager's strides are not known, results of islands get those that their fake values promise.

    Args:
        outputs: which of them; the others are written back to inputs, or saved for the backward.
        strides: index of an output -> its strides in eager.
    """

    outputs: slice
    strides: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    name: str = "give_strides"

    def call(self, graph_module: GraphModule) -> PassResult:
        """Rewrite, in place, an outer graph with fake values."""
        graph = graph_module.graph
        (output,) = graph.find_nodes(op="output")
        values: list[Any] = [*output.args[0]]
        made: dict[Node, Node] = {}
        for index in range(*self.outputs.indices(len(values))):
            value = values[index]
            if not isinstance(value, Node) or (strides := self._wanted(index, value)) is None:
                continue
            if value not in made:
                with graph.inserting_before(output):
                    made[value] = graph.call_function(strided, (value, strides))
                made[value].meta = dict(value.meta)
            values[index] = made[value]
        if made:
            output.args = (type(output.args[0])(values),)
            graph_module.recompile()
        return PassResult(graph_module, bool(made))

    def _wanted(self, index: int, value: Node) -> tuple[int, ...] | None:
        """Give the strides that an output does not come with, or None."""
        fake = value.meta.get("val")
        if value.op != "call_function" or value.target is strided or not has_dimension_of_one(fake):
            return None
        if value.target is not operator.getitem or value.all_input_nodes[0].op != "call_module":
            return self.strides.get(index)
        strides = self.strides.get(index, tuple(fake.stride()))
        order = physical_order(fake)
        return None if strides == contiguous_strides(fake.shape, order[::-1] if order else None) else strides
