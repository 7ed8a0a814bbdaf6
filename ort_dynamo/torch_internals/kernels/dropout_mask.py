"""The operator of a dropout's random mask: `ort_dynamo::bernoulli`."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["DROPOUT_MASK", "dropout_mask"]

_LIBRARY = torch.library.Library("ort_dynamo", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "bernoulli(SymInt[] size, SymInt[] stride, float p, *, Device device) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),
)


@torch.library.impl(_LIBRARY, "bernoulli", "CompositeExplicitAutograd")
def dropout_mask(size: list[int], stride: list[int], p: float, *, device: torch.device) -> torch.Tensor:
    """Generate a random boolean mask with eager dropout's random stream.

    It is filled in place, as in eager: aten's functional form fills a channels_last mask in another order. It is one
    functional operator, since the partitioner accepts a graph with recomputed nodes only if no node mutates. The outer
    graph may call this function without the operator around it.
    """
    return torch.empty_strided(size, stride, dtype=torch.bool, device=device).bernoulli_(p)


DROPOUT_MASK: Any = torch.ops.ort_dynamo.bernoulli.default
