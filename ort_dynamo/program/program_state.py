"""Keeps a program's state while one of its steps runs for another purpose: a dry run or a comparison."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ort_dynamo.program.containers import content_of, held, is_container, put_back
from ort_dynamo.program.read_objects import MOST_ITEMS, has_state
from ort_dynamo.torch_internals.autograd import set_version

__all__ = ["State", "generators", "knows_shapes", "modules_inside", "unchanged"]


class State:
    """The attributes, numbers and gradients that a step may change.

    Attributes:
        leaves: the leaves that require a gradient and that were seen so far, in order.
    """

    def __init__(self) -> None:
        self.leaves: list[torch.Tensor] = []
        self._contents: list[tuple[Any, list[Any]]] = []
        self._seen: set[int] = set()
        self._values: dict[int, tuple[torch.Tensor, int | None, torch.Tensor]] = {}
        self._gradients: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}

    def keep_object(self, owner: Any) -> None:
        """Remember the attributes of an object, such as a module, with what their containers and tensors hold."""
        self.keep_containers([vars(owner)], None if isinstance(owner, (nn.Module, Optimizer)) else MOST_ITEMS)

    def keep_containers(self, containers: Iterable[Any], most: int | None = MOST_ITEMS) -> None:
        """Remember what containers hold, with the containers and tensors in them.

        Args:
            containers: the containers.
            most: larger ones are not looked into.
        """
        for one in held(containers, self._seen, most):
            if isinstance(one, torch.Tensor):
                self.keep_value(one)
                self.keep_gradient(one)
            else:
                self._contents.append((one, content_of(one)))

    def keep_value(self, tensor: torch.Tensor) -> None:
        """Remember the numbers of a tensor."""
        if id(tensor) not in self._values and not tensor.is_meta and not _is_freed(tensor):
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
        """Put all of it back, and let go of it; the first error is raised when the rest is back."""
        with ExitStack() as last:  # which runs all of its callbacks, the last one first
            for container, content in self._contents:
                last.callback(put_back, container, content)
            for tensor, version, numbers in self._values.values():
                last.callback(_write_back, tensor, version, numbers)
            for tensor, gradient in self._gradients.values():
                if tensor.grad is not gradient:
                    tensor.grad = gradient
        for kept in (self.leaves, self._contents, self._seen, self._values, self._gradients):
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
        values: modules, optimizers, tensors, objects and containers that the calls read. Others are left out.
    """
    state = State()
    given = list(values)
    for module in modules_inside(one for one in given if isinstance(one, nn.Module)):
        if knows_shapes(module):
            state.keep_object(module)
    for one in given:
        if isinstance(one, torch.Tensor):
            state.keep_value(one)
            state.keep_gradient(one)
        elif is_container(one):
            state.keep_containers([one])
        elif not isinstance(one, nn.Module) and has_state(one):
            state.keep_object(one)
    with generators():
        try:
            yield state
        finally:
            state.restore()


def modules_inside(models: Iterable[nn.Module]) -> list[nn.Module]:
    """List some models and the modules inside them, each once."""
    return list({id(module): module for model in models for module in model.modules()}.values())


def knows_shapes(module: nn.Module) -> bool:
    """Check whether a module's own parameters have shapes; those of nn.LazyLinear have none before its first call."""
    return not any(map(is_lazy, module.parameters(recurse=False)))


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


def _is_freed(tensor: torch.Tensor) -> bool:
    """Check for a tensor whose memory is given back, as FSDP does between calls."""
    plain = type(tensor.data) is torch.Tensor and tensor.layout is torch.strided
    return plain and tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0


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
