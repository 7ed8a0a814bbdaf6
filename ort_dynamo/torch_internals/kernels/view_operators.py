"""Operators whose results live in the memory of their first argument."""

from __future__ import annotations

from ort_dynamo.torch_internals.kernels.operators import aten

__all__ = ["ALIASES", "MULTI_VIEWS", "REARRANGEMENTS", "RESHAPES", "VIEWS"]

ALIASES = (aten.detach.default, aten.alias.default)
"""Operators that return a whole tensor unchanged; torch 2.15 traces the first as the second."""

RESHAPES = (aten.view.default, aten._unsafe_view.default)
"""Operators that give a tensor other sizes, the elements in the order that they had."""

REARRANGEMENTS = frozenset(
    {
        *RESHAPES,
        aten.permute.default,
        aten.transpose.int,
        aten.t.default,
        aten.unsqueeze.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        *ALIASES,
    }
)
"""Those of VIEWS that give each element of the first argument once."""

VIEWS = REARRANGEMENTS | frozenset(
    {
        aten.expand.default,
        aten.slice.Tensor,
        aten.select.int,
        aten.diagonal.default,
        aten.unfold.default,
        aten.as_strided.default,
        aten._neg_view.default,
    }
)
"""Operators whose output shares the first argument's memory and that torch runs without touching the data."""

MULTI_VIEWS = frozenset(
    {
        aten.split.Tensor,
        aten.split_with_sizes.default,
        aten.unsafe_split.Tensor,
        aten.unsafe_split_with_sizes.default,
        aten.unbind.int,
        aten.chunk.default,
        aten.tensor_split.sections,
    }
)
"""The same with a list of outputs: their getitem nodes are views, too."""
