"""Keeps a program's state through a dry run: tensors, gradients and random generators are as they were."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ort_dynamo.torch_internals.aot import metadata
from ort_dynamo.torch_internals.pytree import tree_leaves

__all__ = ["State", "unchanged"]


class State:
    """The tensors that a dry run may change, and the leaves that it gives gradients to.

    Attributes:
        leaves: the leaves that require a gradient and that were seen so far, in order.
    """

    def __init__(self) -> None:
        self.leaves: list[torch.Tensor] = []
        self._values: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._gradients: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}

    def keep_value(self, tensor: torch.Tensor) -> None:
        """Remember the value of a tensor that is going to be written to."""
        if id(tensor) not in self._values:
            self._values[id(tensor)] = tensor, tensor.detach().clone()

    def keep_gradient(self, tensor: torch.Tensor) -> None:
        """Set the gradient of a leaf aside until the end."""
        if tensor.is_leaf and tensor.requires_grad and id(tensor) not in self._gradients:
            self._gradients[id(tensor)] = tensor, tensor.grad
            self.leaves.append(tensor)
            tensor.grad = None

    def restore(self) -> None:
        """Put values and gradients back, and let go of them."""
        for tensor, grad in self._gradients.values():
            tensor.grad = grad
        with torch.no_grad():
            for tensor, value in self._values.values():
                tensor.copy_(value)
        self.leaves.clear()
        self._values.clear()
        self._gradients.clear()

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


def written_inputs() -> tuple[int, ...]:
    """Return the indices of the inputs that the graph writes to that AOTAutograd is at."""
    known = metadata()
    inputs = known.input_info if known is not None else []
    return tuple(index for index, info in enumerate(inputs) if info.mutates_data)


@contextmanager
def unchanged(function: Callable[..., Any], inputs: Any) -> Iterator[State]:
    """Restore the side effects of calls: buffers, gradients, tensors that graphs write to, and random generators.

    Tensors are put back that a compiled graph writes to, and buffers of a module.

    Args:
        function: a module or a function.
        inputs: the arguments of its calls.
    """
    state = State()
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    modules = [function] if isinstance(function, nn.Module) else []
    parameters = [one for module in modules for one in module.parameters()]
    buffers = [one for module in modules for one in module.buffers()]
    for buffer in buffers:
        state.keep_value(buffer)
    for leaf in (*parameters, *tensors):
        state.keep_gradient(leaf)
    found = {one.device.index for one in (*tensors, *parameters, *buffers) if one.device.type == "cuda"}
    devices = sorted(index for index in found if index is not None)
    python, numpy = random.getstate(), sys.modules.get("numpy")
    drawn = numpy.random.get_state() if numpy else None
    try:
        with torch.random.fork_rng(devices):
            yield state
    finally:
        state.restore()
        random.setstate(python)
        if numpy:
            numpy.random.set_state(drawn)
