"""Tells whether two operators chose equal elements, where torch leaves open which of these it chooses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ort_dynamo.torch_internals.kernels.operators import aten, named_arguments

__all__ = ["is_same_choice"]

_CHOOSES = (
    aten.argmax.default,
    aten.argmin.default,
    aten.argsort.default,
    aten.kthvalue.default,
    aten.max.dim,
    aten.median.dim,
    aten.min.dim,
    aten.mode.default,
    aten.sort.default,
    aten.topk.default,
)
"""Operators whose last result is the indices of elements, along the argument `dim`; of equal ones it is any."""


_SEVERAL = (aten.argsort.default, aten.sort.default, aten.topk.default)
"""Those that choose several elements, each once."""


def is_same_choice(
    operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], found: Sequence[Any], expected: Sequence[Any]
) -> bool:
    """Check whether an operator that chooses elements has chosen elements that are equal to torch's.

    Args:
        operator: any operator; one that chooses nothing gives False.
        args, kwargs: its arguments.
        found, expected: two results, the last of each being indices.
    """
    if operator not in _CHOOSES or not isinstance(found[-1], torch.Tensor):
        return False
    named = named_arguments(operator, args, kwargs)
    tensor, dim, ours, theirs = args[0], named.get("dim"), found[-1], expected[-1]
    if ours.shape != theirs.shape:
        return False
    if dim is None or not tensor.dim():
        tensor, dim, ours, theirs = tensor.flatten(), 0, ours.flatten(), theirs.flatten()
    elif ours.dim() < tensor.dim():
        ours, theirs = ours.unsqueeze(dim), theirs.unsqueeze(dim)
    if not bool(((ours >= 0) & (ours < tensor.shape[dim])).all()):
        return False
    if operator in _SEVERAL and not bool((ours.sort(dim).values.diff(dim=dim) > 0).all()):
        return False  # it chose one element twice
    one, other = (tensor.take_along_dim(chosen, dim) for chosen in (ours, theirs))
    return bool(((one == other) | ((one != one) & (other != other))).all())  # NaN equals NaN here
