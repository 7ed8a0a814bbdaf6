"""Keeps a program's state while one of its steps runs for another purpose: a dry run or a comparison."""

from __future__ import annotations

import copy
import operator
import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ort_dynamo.program.read_objects import MOST_ITEMS, has_state
from ort_dynamo.torch_internals.autograd import set_version

__all__ = ["State", "generators", "unchanged"]


class State:
    """The attributes, numbers and gradients that a step may change.

    Attributes:
        leaves: the leaves that require a gradient and that were seen so far, in order.
    """

    def __init__(self) -> None:
        self.leaves: list[torch.Tensor] = []
        self._attributes: list[tuple[Any, dict[str, Any]]] = []
        self._contents: list[tuple[Any, Any]] = []
        self._values: dict[int, tuple[torch.Tensor, int | None, torch.Tensor]] = {}
        self._gradients: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}

    def keep_object(self, owner: Any) -> None:
        """Remember the attributes of an object, such as a module, with what their containers and tensors hold."""
        attributes = dict(vars(owner))
        self._attributes.append((owner, attributes))
        most = None if isinstance(owner, (nn.Module, Optimizer)) else MOST_ITEMS
        for one in _held(attributes.values(), set(), most):
            if isinstance(one, torch.Tensor):
                self.keep_value(one)
                self.keep_gradient(one)
            else:
                self._contents.append((one, copy.copy(one)))

    def keep_value(self, tensor: torch.Tensor) -> None:
        """Remember the numbers of a tensor."""
        if id(tensor) not in self._values and not tensor.is_meta:
            self._values[id(tensor)] = tensor, _version(tensor), tensor.detach().clone()

    def keep_gradient(self, tensor: torch.Tensor) -> None:
        """Set the gradient of a leaf aside until the end; the step has a copy of it to read, to zero and to add to."""
        if not tensor.is_leaf or id(tensor) in self._gradients:
            return
        gradient = tensor.grad
        self._gradients[id(tensor)] = tensor, gradient
        if gradient is not None:
            tensor.grad = gradient.detach().clone()
        if tensor.requires_grad:
            self.leaves.append(tensor)

    def restore(self) -> None:
        """Put all of it back, and let go of it."""
        for container, content in (*((vars(owner), before) for owner, before in self._attributes), *self._contents):
            if not _is_same(container, content):  # another thread may look at it now
                _PUT_BACK[type(container)](container, content)
        for tensor, version, numbers in self._values.values():
            _write_back(tensor, version, numbers)
        for tensor, gradient in self._gradients.values():
            if tensor.grad is not gradient:
                tensor.grad = gradient
        for kept in (self.leaves, self._attributes, self._contents, self._values, self._gradients):
            kept.clear()

    def watched(self, compiled: Callable[..., Any], written: Iterable[int]) -> Callable[..., Any]:
        """Have a compiled graph's inputs remembered before it runs.

        Args:
            compiled: takes the inputs of Dynamo's graph.
            written: the indices of inputs that it writes to.
        """
        indices = frozenset(written)

        def run(*inputs: Any) -> Any:
            for index, tensor in enumerate(inputs):
                if isinstance(tensor, torch.Tensor):
                    if index in indices:
                        self.keep_value(tensor)
                    self.keep_gradient(tensor)
            return compiled(*inputs)

        return run


@contextmanager
def unchanged(values: Iterable[Any]) -> Iterator[State]:
    """Restore the side effects of calls: attributes, numbers, gradients and random generators.

    Modules that do not know the shapes of their parameters yet, such as nn.LazyLinear, get them for good.

    Args:
        values: modules, optimizers, tensors and objects that the calls read. Other values are left out.
    """
    state = State()
    given = list(values)
    inner = [module for one in given if isinstance(one, nn.Module) for module in one.modules()]
    for module in {id(one): one for one in inner}.values():
        if not any(map(is_lazy, module.parameters(recurse=False))):
            state.keep_object(module)
    for one in given:
        if isinstance(one, Optimizer):
            state.keep_object(one)
        elif isinstance(one, torch.Tensor):
            state.keep_value(one)
            state.keep_gradient(one)
        elif not isinstance(one, nn.Module) and has_state(one):
            state.keep_object(one)
    with generators():
        try:
            yield state
        finally:
            state.restore()


@contextmanager
def generators() -> Iterator[None]:
    """Restore the random generators of Python, NumPy and torch, those of all CUDA devices included."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


# -- attributes and numbers ------------------------------------------------------------------------------------------


def _held(values: Iterable[Any], seen: set[int], most: int | None) -> Iterator[Any]:
    """Yield the tensors among some values, and the containers with all that is in them, each once.

    Containers of more than `most` items come without what is in them.
    """
    for one in values:
        is_container = type(one) in _PUT_BACK
        if id(one) in seen or not (is_container or isinstance(one, torch.Tensor)):
            continue
        seen.add(id(one))
        yield one
        if is_container and (most is None or len(one) <= most):
            yield from _held(list(one.values() if isinstance(one, dict) else one), seen, most)


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _write_back(tensor: torch.Tensor, version: int | None, numbers: torch.Tensor) -> None:
    """Put the numbers of a tensor back, if they have changed, and its count of writes: a backward may be pending."""
    if version is None:
        with torch.inference_mode():
            tensor.copy_(numbers)
    elif version != tensor._version:
        with torch.no_grad():
            tensor.detach().copy_(numbers)
        set_version(tensor, version)
    elif type(tensor.data) is torch.Tensor and tensor.layout is torch.strided and not torch.equal(tensor, numbers):
        tensor.data.copy_(numbers)  # the step wrote through .data, which counts no version; nor does this


def _is_same(container: Any, content: Any) -> bool:
    """Check whether a container has the items that it had, in their order."""
    if isinstance(container, dict):
        container, content = ([*one.keys(), *one.values()] for one in (container, content))
    elif isinstance(container, set):
        return bool(container == content)
    return len(container) == len(content) and all(map(operator.is_, container, content))


def _refill(container: Any, content: Any) -> None:
    container.clear()
    container.update(content)


def _relist(container: Any, content: Any) -> None:
    container.clear()
    container.extend(content)


_PUT_BACK: Mapping[type, Callable[[Any, Any], None]] = {
    **dict.fromkeys((dict, OrderedDict, defaultdict, set), _refill),
    **dict.fromkeys((list, deque), _relist),
}
"""Type of a container that a step may change in place -> how its content is put back."""
