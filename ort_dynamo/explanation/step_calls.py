"""Counts the calls of compiled graphs in a step, and the bytes that each call saves for the backward."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ort_dynamo.compilation.events import BoxedRun, GraphCompilation
from ort_dynamo.explanation.data import Call
from ort_dynamo.torch_internals.autograd import in_backward

__all__ = ["StepCalls"]


class StepCalls:
    """The calls of graphs, step by step.

    A step ends at the first call of a forward after a backward, or after all that the step has saved is freed. A call
    whose saved memory lives on, since a second backward needs it, belongs to the next step as well.

    A call saves the memory that no earlier call of its step saves and that the step has not been given, as parameters
    and inputs are.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: list[_Saved] = []
        self._without: set[int] = set()
        self._made: dict[int, StorageWeakRef] = {}
        self._kept: dict[int, StorageWeakRef] = {}
        self._has_backward = False
        self._largest: list[tuple[Any, int]] = []

    def largest(self, owners: Sequence[Any]) -> tuple[Call, ...]:
        """Return the calls of the step that saves most, in order.

        Args:
            owners: those of the graphs, by whose indices the calls name graphs; calls of others are left out.
        """
        indices = {id(one): index for index, one in enumerate(owners)}
        with self._lock:
            calls = max(self._largest, self._sizes(), key=_size)
            return tuple(Call(indices[id(owner)], saved) for owner, saved in calls if id(owner) in indices)

    def watched(self, owner: Any, graph: GraphCompilation, run: BoxedRun) -> BoxedRun:
        """Have the calls of a graph counted.

        Args:
            owner: by which `largest` names the graph.
            graph: the graph.
            run: runs it.
        """

        def counted(given: list[Any]) -> Any:
            if graph.role == "backward":
                with self._lock:
                    self._has_backward = True
                return run(given)
            inputs = [one.untyped_storage().data_ptr() for one in given if _has_storage(one)]
            results = run(given)
            if not in_backward():  # a checkpoint calls its forward once more
                saved = results[graph.seen.stop :] if graph.role == "forward" else ()
                self._note(owner, inputs, results, saved)
            return results

        counted._boxed_call = True  # type: ignore[attr-defined]
        return counted

    def _sizes(self) -> list[tuple[Any, int]]:
        return [(one.owner, sum(nbytes for _, nbytes in one.storages.values())) for one in self._calls]

    def _begin(self) -> None:
        self._largest = max(self._largest, self._sizes(), key=_size)
        alive = [_Saved(call.owner, _alive(call.storages)) for call in self._calls]
        self._calls = [call for call in alive if call.storages]
        self._without = set()
        self._made = {place: storage for place, storage in self._made.items() if _is_alive(storage)}
        self._kept = {place: storage for place, storage in self._kept.items() if _is_alive(storage)}
        self._has_backward = False

    def _note(self, owner: Any, inputs: Sequence[int], results: Sequence[Any], saved: Sequence[Any]) -> None:
        with self._lock:
            if self._has_backward or (self._kept and not any(map(_is_alive, self._kept.values()))):
                self._begin()
            if not saved:
                if id(owner) in self._without:
                    return  # a program without gradients has one step without an end
                self._without.add(id(owner))
            from_outside = {one for one in inputs if not _is_alive(self._made.get(one))}
            new = _Saved(owner, {})
            for one in filter(_has_storage, saved):
                storage = one.untyped_storage()
                place = storage.data_ptr()
                if place not in from_outside and not _is_alive(self._kept.get(place)):
                    self._kept[place] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                    new.storages[place] = self._kept[place], storage.nbytes()
            for one in filter(_has_storage, results):
                storage = one.untyped_storage()
                if storage.data_ptr() not in from_outside:
                    self._made[storage.data_ptr()] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            self._calls.append(new)


class _Saved(NamedTuple):
    """One call.

    Attributes:
        owner: of its graph.
        storages: address -> the storage that it saves, and its bytes.
    """

    owner: Any
    storages: dict[int, tuple[StorageWeakRef, int]]


def _alive(storages: Mapping[int, tuple[StorageWeakRef, int]]) -> dict[int, tuple[StorageWeakRef, int]]:
    return {place: one for place, one in storages.items() if _is_alive(one[0])}


def _size(calls: Sequence[tuple[Any, int]]) -> tuple[int, int]:
    return sum(nbytes for _, nbytes in calls), len(calls)


def _is_alive(storage: StorageWeakRef | None) -> bool:
    return storage is not None and not storage.expired()  # type: ignore[no-untyped-call]


def _has_storage(value: Any) -> bool:
    plain = isinstance(value, torch.Tensor) and value.layout is torch.strided and value.device.type != "meta"
    return plain and value.untyped_storage().nbytes() > 0
