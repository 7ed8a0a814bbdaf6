"""Runs a program as it is, and each of its operators in float64 beside it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ort_dynamo.torch_internals.fakes import storage_identity
from ort_dynamo.torch_internals.kernels.dispatcher import TorchDispatchMode
from ort_dynamo.torch_internals.kernels.operators import OpOverload, aten, is_collective, schema_of
from ort_dynamo.torch_internals.pytree import tree_leaves, tree_map

__all__ = ["InDouble"]

_log = logging.getLogger(__name__)

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_PRUNED_EVERY = 256
"""Number of new allocations after which those that are gone are forgotten."""


class InDouble(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs each operator twice: as the program calls it, and in float64 on float64 values of its own.

    The program sees its own results alone, with its own random numbers, autocast and in-place writes. Each allocation
    of narrower floats has one of float64 beside it, which views of it share. Random operators, collectives, and kernels
    that torch lacks in float64 and in float32, are not repeated: their float64 value is the program's.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._beside: dict[int, tuple[StorageWeakRef, torch.Tensor, int]] = {}
        self._made = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one operator in both ways."""
        given = (args, dict(kwargs or {}))
        if not isinstance(func, OpOverload):  # a higher-order operator: its results are taken as they are
            return func(*args, **given[1])
        wide = None if _is_random(func) or is_collective(func) else tree_map(self._widen, given)
        results = func(*args, **given[1])
        made = None
        if func is aten.native_dropout.default:
            made = _dropped(self.read(args[0]), args[1], results)
        elif wide is not None and any(map(_is_narrow, tree_leaves((given, results)))):
            made = _first(func, wide, torch.float64, torch.float32)
        if made is None and (schema_of(func).is_mutable or is_collective(func)):  # whose schemas do not tell
            self._forget(args)
        self._note(results, made)
        return results

    def read(self, value: Any) -> Any:
        """Return the float64 value of a tensor of the program's, as a copy; anything else as it is."""
        wide = self._widen(value)
        return wide.clone() if isinstance(wide, torch.Tensor) else wide

    def _widen(self, value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return torch.float64 if value in _FLOATS else value
        if not _is_narrow(value):
            return value
        kept = self._beside.get(storage_identity(value))
        if kept is None or kept[2] != value.itemsize:
            return self._keep(value)
        return kept[1].as_strided(value.size(), value.stride(), value.storage_offset())

    def _keep(self, value: torch.Tensor) -> torch.Tensor:
        """Make the float64 allocation beside the one of `value`, with its numbers, and give its view of it."""
        storage = value.untyped_storage()
        whole = value.detach().as_strided((storage.nbytes() // value.itemsize,), (1,), 0)
        wide = whole.double()
        self._beside[storage_identity(value)] = (_weak(storage), wide, value.itemsize)
        self._made += 1
        if self._made % _PRUNED_EVERY == 0:
            self._beside = {key: kept for key, kept in self._beside.items() if not _is_gone(kept[0])}
        return wide.as_strided(value.size(), value.stride(), value.storage_offset())

    def _note(self, results: Any, made: Any) -> None:
        wide = [None] * len(tree_leaves(results)) if made is None else tree_leaves(made)
        for result, one in zip(tree_leaves(results), wide, strict=True):
            if one is None or not _is_narrow(result) or storage_identity(result) in self._beside:
                continue  # made later of the program's own numbers, or a view, or written in place
            self._keep(result).copy_(one)

    def _forget(self, args: Any) -> None:
        for value in tree_leaves(args):
            if _is_narrow(value):
                self._beside.pop(storage_identity(value), None)


def _first(func: Any, wide: Any, *dtypes: torch.dtype) -> Any:
    """Run an operator in the first of some dtypes that it has a kernel for; None where it has none."""
    for dtype in dtypes:
        args, kwargs = wide if dtype is torch.float64 else tree_map(partial(_narrowed, dtype), wide)
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:  # NotImplementedError as well
            _log.debug("%s has no form in %s: %s", func, dtype, error)
        if schema_of(func).is_mutable:
            break  # it writes to its arguments, which are copies in another dtype
    return None


def _narrowed(dtype: torch.dtype, value: Any) -> Any:
    if value is torch.float64:
        return dtype
    is_wide = isinstance(value, torch.Tensor) and value.dtype is torch.float64
    return value.to(dtype) if is_wide else value


def _weak(storage: Any) -> StorageWeakRef:
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def _is_gone(storage: StorageWeakRef) -> bool:
    return bool(storage.expired())  # type: ignore[no-untyped-call]


def _is_narrow(value: Any) -> bool:
    plain = isinstance(value, torch.Tensor) and value.layout is torch.strided and value.device.type != "meta"
    return plain and value.dtype in _FLOATS


def _is_random(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def _dropped(value: torch.Tensor, probability: float, results: Any) -> Any:
    mask = results[1]
    scale = 0.0 if probability == 1 else 1 / (1 - probability)
    return value * mask * scale, mask
