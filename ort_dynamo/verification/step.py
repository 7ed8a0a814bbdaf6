"""Runs a step of a program, names all that can be seen of it, and puts everything back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ort_dynamo.program.program_state import unchanged
from ort_dynamo.testing import copied
from ort_dynamo.torch_internals.autograd import gradients_unless_freed
from ort_dynamo.torch_internals.pytree import tree_leaves
from ort_dynamo.verification.copies import Copies, refuse_nested

__all__ = ["Step"]

_SEED = 0x5EED
"""The seed of the generator of random gradients, which no program uses."""


@dataclass(frozen=True)
class Step:
    """A call of a model or a function, with the gradients that follow.

    Attributes:
        args, kwargs: of the call; each run gets copies of their tensors.
        modules: prefix of names -> module whose parameters and buffers belong to the step.
        names: of `args`; their numbers where there are none.
        others: optimizers and tensors that are put back, too.
        held: tensors that the call reads beside its arguments: attributes of a graph. They are compared as inputs
            are, and put back.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    modules: Mapping[str, nn.Module] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    others: tuple[Any, ...] = ()
    held: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def observe(
        self,
        call: Callable[..., Any],
        watching: AbstractContextManager[Any] | None = None,
        read: Callable[[Any], Any] = copied,
    ) -> dict[str, Any]:
        """Run the step, and return its outputs, gradients, buffers and inputs by their names.

        Outputs of one element are losses: their gradients are the step's. Without one, the gradients of all outputs
        are drawn, the same at each run. If the call itself has run the backward, its gradients are the step's.

        Args:
            call: called with the step's arguments.
            watching: open while the step runs.
            read: makes of a tensor the value that is returned.

        Raises:
            UncheckableError: an input cannot be copied, or an output is a nested tensor.
        """
        copies = Copies((self.args, dict(self.kwargs)), _holds_tensors)
        args, kwargs = copies.values
        with unchanged((*self.modules.values(), *self.others, *self.held.values())):
            with watching or nullcontext():
                outputs = call(*args, **kwargs)
                for one in tree_leaves(outputs):
                    refuse_nested(one)
                leaves = self._leaves(args, kwargs)
                gradients = _gradients(outputs, {name: copies.leaf_of(one) for name, one in leaves.items()})
            seen = {f"output {name}": one for name, one in _named(outputs)} | gradients
            seen |= {f"buffer {name}": one for name, one in self._tensors("named_buffers")}
            seen |= {f"{name} after": one for name, one in leaves.items() if name.startswith(("input", "attribute"))}
            return {name: read(one.detach()) if isinstance(one, torch.Tensor) else one for name, one in seen.items()}

    def _tensors(self, kind: str) -> Iterator[tuple[str, torch.Tensor]]:
        for prefix, module in self.modules.items():
            for name, one in getattr(module, kind)():
                yield f"{prefix}.{name}" if prefix else name, one

    def _leaves(self, args: Any, kwargs: Any) -> dict[str, torch.Tensor]:
        names = self.names or tuple(map(str, range(len(args))))
        inputs = [*zip(names, args, strict=True), *kwargs.items()]
        named = ((f"{name}{rest}", leaf) for name, value in inputs for rest, leaf in _inside(value))
        tensors = {f"input {name}": leaf for name, leaf in named if isinstance(leaf, torch.Tensor)}
        tensors |= {f"attribute {name}": one for name, one in self.held.items()}
        return tensors | {f"parameter {name}": one for name, one in self._tensors("named_parameters")}


def _holds_tensors(leaf: Any) -> bool:
    return not isinstance(leaf, torch.Tensor) and bool(next(_comparable(leaf), ("", None))[0])


def _named(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a call's result, with names such as "loss" and "0[1]"."""
    match value:
        case dict():
            parts = [(str(key), one) for key, one in value.items()]
        case tuple() | list():
            parts = [(str(index), one) for index, one in enumerate(value)]
        case _:
            parts = [("0", value)]
    for name, one in parts:
        yield from ((f"{name}{rest}", leaf) for rest, leaf in _inside(one))


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested values with their places, such as "['labels'][0]"."""
    match value:
        case dict():
            for key, one in value.items():
                yield from ((f"[{key!r}]{rest}", leaf) for rest, leaf in _inside(one))
        case tuple() | list():
            for index, one in enumerate(value):
                yield from ((f"[{index}]{rest}", leaf) for rest, leaf in _inside(one))
        case _:
            leaves = tree_leaves(value)
            for index, leaf in enumerate(leaves):
                place = f"[{index}]" if len(leaves) > 1 else ""
                yield from ((f"{place}{rest}", one) for rest, one in _comparable(leaf))


def _comparable(leaf: Any, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield a leaf that can be compared, or the tensors that an object of another kind holds, such as a cache."""
    if isinstance(leaf, (torch.Tensor, bool, int, float, complex, str, torch.dtype, type(None))):
        yield "", leaf
    elif depth < _DEPTH and not isinstance(leaf, (nn.Module, type)):
        items = leaf if isinstance(leaf, (list, tuple)) else getattr(leaf, "__dict__", {})
        pairs = enumerate(items) if isinstance(items, (list, tuple)) else items.items()
        for key, value in pairs:
            place = f"[{key}]" if isinstance(key, int) else f".{key}"
            found = ((f"{place}{rest}", one) for rest, one in _comparable(value, depth + 1))
            yield from ((name, one) for name, one in found if isinstance(one, torch.Tensor))


_DEPTH = 4
"""Tensors are looked for this deep in an object."""


def _gradients(outputs: Any, leaves: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return the gradients of a call's outputs, or those that its own backward has left in the leaves."""
    tensors = [one for one in tree_leaves(outputs) if isinstance(one, torch.Tensor) and one.requires_grad]
    wanted = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad and leaf.is_leaf}
    if tensors and wanted and torch.is_grad_enabled():
        losses = [one for one in tensors if one.numel() == 1]
        generator = torch.Generator().manual_seed(_SEED)
        cotangents = [torch.ones_like(one) for one in losses] or [_random_cotangent(one, generator) for one in tensors]
        found = gradients_unless_freed(losses or tensors, list(wanted.values()), cotangents)
        if found is not None:
            return {f"gradient of {name}": one for name, one in zip(wanted, found, strict=True)}
    return {f"gradient of {name}": leaf.grad for name, leaf in wanted.items() if leaf.grad is not None}


def _random_cotangent(output: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    dtype = torch.complex64 if output.is_complex() else torch.float32
    return torch.randn(output.shape, dtype=dtype, generator=generator).to(output)
