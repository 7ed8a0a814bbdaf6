"""Copies the tensors of a call, so that each run of it begins from the same values and memory."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ort_dynamo.testing import copied
from ort_dynamo.torch_internals.fakes import storage_identity
from ort_dynamo.torch_internals.pytree import tree_leaves, tree_map

__all__ = ["Copies", "UncheckableError", "refuse_nested"]


class UncheckableError(Exception):
    """A call cannot be compared with eager mode; the text is the reason."""


class Copies:
    """Copies of the tensors in nested arguments.

    A leaf stays a leaf, and the result of an operator stays one, so that a call may write to it. Tensors that share
    memory share it in the copy, too.

    Attributes:
        values: the arguments with copied tensors.

    Args:
        values: the arguments.
        holds_tensors: says whether an object that is no tensor holds some; it is copied with them then.

    Raises:
        UncheckableError: a tensor has no copy that behaves as it does.
    """

    def __init__(self, values: Any, holds_tensors: Callable[[Any], bool]) -> None:
        self._holds_tensors = holds_tensors
        self._made: dict[int, Any] = {}
        self._leaves: dict[int, torch.Tensor] = {}
        self._storages: dict[int, Any] = {}
        self._roots: dict[int, torch.Tensor] = {}
        given = {id(leaf): leaf for leaf in tree_leaves(values)}.values()
        together: dict[Any, list[torch.Tensor]] = defaultdict(list)
        for one in given:
            refuse_nested(one)
            if hasattr(type(one), "__tensor_flatten__"):
                raise UncheckableError(f"it has tensors of the class {type(one).__name__}")
            if isinstance(one, torch.Tensor) and one.layout is torch.strided:
                together[storage_identity(one), one.dtype].append(one)
        for tensors in together.values():
            roots = {id(root): root for root in map(_root, tensors)}
            if len(tensors) > 1 and len(roots) == 1 and _overlap(tensors):
                self._roots |= {id(one): root for root in roots.values() for one in tensors}
        self.values = tree_map(self._copy, values)

    def leaf_of(self, value: torch.Tensor) -> torch.Tensor:
        """Return the leaf that gets the gradient of a copy: the copy itself unless it copies an operator's result."""
        return self._leaves.get(id(value), value)

    def _copy(self, value: Any) -> Any:
        if id(value) not in self._made:
            self._made[id(value)] = self._new(value)
        return self._made[id(value)]

    def _new(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return copy.deepcopy(value) if self._holds_tensors(value) else value
        if value.layout is not torch.strided:
            return copied(value)
        root = self._roots.get(id(value), value)
        return self._alone(value) if root is value else self._view(value, root)

    def _alone(self, value: torch.Tensor) -> torch.Tensor:
        """Copy a tensor that is no view of another copy."""
        made = self._detached(value)
        if value.is_leaf or torch.is_inference_mode_enabled():
            return made.requires_grad_(value.requires_grad)
        with torch.enable_grad():
            leaf = made.requires_grad_()
            result: torch.Tensor = _Result.apply(leaf, lambda: self._detached(value))  # type: ignore[no-untyped-call]
        self._leaves[id(result)] = leaf
        return result

    def _view(self, value: torch.Tensor, root: torch.Tensor) -> torch.Tensor:
        """Copy a view as a view of its copied base, since a write to one is a write to the other for autograd, too."""
        base = self._copy(root)
        with torch.set_grad_enabled(not (value.is_leaf and root.requires_grad)):  # such a view is made under no_grad
            made: torch.Tensor = base.as_strided(value.shape, value.stride(), value.storage_offset())
        if value.requires_grad and not made.requires_grad:
            made.requires_grad_()
        if (made.requires_grad, made.is_leaf) != (value.requires_grad, value.is_leaf):
            raise UncheckableError("its inputs are views of one tensor and have gradients of their own")
        self._leaves[id(made)] = self.leaf_of(made if made.is_leaf else base)
        return made

    def _detached(self, value: torch.Tensor) -> torch.Tensor:
        """Copy the numbers and strides of a tensor; the copies of one storage are on one storage."""
        with torch.no_grad():
            place = storage_identity(value)
            if place not in self._storages:
                self._storages[place] = value.untyped_storage().clone()  # type: ignore[no-untyped-call]
            made = torch.empty(0, dtype=value.dtype, device=value.device)
            made.set_(self._storages[place], value.storage_offset(), value.shape, value.stride())
        return made


class _Result(torch.autograd.Function):
    """Makes a copy a result of an operator, with the gradient of a leaf."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the copy."""
        return make()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Pass the gradient on."""
        return gradient, None


def _root(value: torch.Tensor) -> torch.Tensor:
    base = value._base
    return value if base is None or base.dtype is not value.dtype else base


def _overlap(tensors: Sequence[torch.Tensor]) -> bool:
    """Check whether an element of one storage is in two of some tensors of one dtype."""
    storage, device = tensors[0].untyped_storage(), tensors[0].device
    place = "cpu" if device.type == "meta" else device
    seen = torch.zeros(storage.nbytes() // tensors[0].itemsize, dtype=torch.bool, device=place)
    for one in tensors:
        part = seen.as_strided(one.shape, one.stride(), one.storage_offset())
        if bool(part.any()):
            return True
        part.fill_(True)
    return False


def refuse_nested(value: Any) -> None:
    """Raise UncheckableError for a nested tensor, whose sizes torch cannot compare or draw."""
    if isinstance(value, torch.Tensor) and value.is_nested:
        raise UncheckableError("it has nested tensors")
