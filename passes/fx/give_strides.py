"""Give results that the program sees eager's strides of dimensions of one element."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from ort_dynamo.graph.boundary import physical_order
from ort_dynamo.passes.fx.analysis.eager_strides import has_dimension_of_one
from ort_dynamo.passes.fx.analysis.views import is_given_by_island
from ort_dynamo.passes.fx.analysis.wrapped_outputs import wrap_outputs
from ort_dynamo.passes.ordering import Condition, ordering
from ort_dynamo.torch_internals.kernels.iterator_strides import contiguous_strides

__all__ = ["GiveStrides", "strided"]


def strided(tensor: torch.Tensor, strides: tuple[int, ...], usual: tuple[int, ...]) -> torch.Tensor:
    """Return `tensor` in its memory, with `strides` in the dimensions of one element.

    Args:
        tensor: a tensor.
        strides: the wanted ones.
        usual: strides that differ from the wanted ones in dimensions of one element alone. Others take longer.
    """
    own = tensor.stride()
    if own == strides:
        return tensor
    if own != usual:
        both = zip(tensor.shape, own, strides, strict=True)
        strides = tuple(wanted if size == 1 else stride for size, stride, wanted in both)
    return tensor.as_strided(tensor.shape, strides)


strided.keeps_value = True  # type: ignore[attr-defined]  # the maker gives the fake value


@ordering(needs=[Condition.FUNCTIONAL], gives=[Condition.STRIDES_GIVEN])
@dataclass(frozen=True)
class GiveStrides(PassBase):
    """Pass outputs through `strided`, which moves no data. Such a stride is metadata, and a session has none.

    If eager's strides are not known, results of islands get those of their fake values.

    Args:
        outputs: the outputs to change; the others are written back to inputs, or saved for the backward.
        strides: index of an output -> its strides in eager.
    """

    outputs: slice
    strides: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    name: str = "give_strides"

    def call(self, graph_module: GraphModule) -> PassResult:
        """Rewrite, in place, an outer graph with fake values."""
        return PassResult(graph_module, wrap_outputs(graph_module, self.outputs, strided, self._wanted))

    def _wanted(self, index: int, value: Node) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Give the strides that an output is to have, and those of memory in its order; None where it has them."""
        fake = value.meta.get("val")
        if not has_dimension_of_one(fake):
            return None
        order = physical_order(fake)
        usual = contiguous_strides(fake.shape, order[::-1] if order else None)
        if is_given_by_island(value):
            strides = _in_one(fake, self.strides.get(index, tuple(fake.stride())), usual)
            return None if strides == usual else (strides, usual)
        known = self.strides.get(index)
        return None if known is None else (_in_one(fake, known, usual), usual)


def _in_one(fake: torch.Tensor, wanted: tuple[int, ...], usual: tuple[int, ...]) -> tuple[int, ...]:
    """Strides that are the wanted ones in dimensions of one element alone: in the others they would show other data."""
    both = zip(fake.shape, wanted, usual, strict=True)
    return tuple(one if size == 1 else other for size, one, other in both)
