"""Lets a model with masks be traced as one graph, and undoes tracing's changes on its modules."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

__all__ = ["mask_questions_answered", "patch_mask_checks", "unchanged"]


@dataclass(frozen=True)
class _NotCausal:
    """A forward pre-hook that sets `is_causal` to False if the program does not set it.

    Without it, nn.TransformerEncoder and nn.TransformerDecoder compare the mask with a causal one and branch on the
    result, which cannot be traced. Both branches use the mask, so the results are equal.

    Attributes:
        name: the name of the parameter.
        position: the number of arguments before it.
    """

    name: str
    position: int

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Put False where the program gave None or nothing."""
        if len(args) > self.position:
            if args[self.position] is not None:
                return None
            return (*args[: self.position], False, *args[self.position + 1 :]), kwargs
        if kwargs.get(self.name) is not None:
            return None
        return args, {**kwargs, self.name: False}


_HOOKS: dict[type[Any], _NotCausal] = {
    nn.TransformerEncoder: _NotCausal("is_causal", 3),
    nn.TransformerDecoder: _NotCausal("tgt_is_causal", 6),
}


def patch_mask_checks(model: nn.Module) -> list[Any]:
    """Set `is_causal` to False in the transformers of a model; give the handles that undo it.

    Subclasses with another forward do not change.
    """
    return [
        module.register_forward_pre_hook(hook, with_kwargs=True)
        for module in model.modules()
        for kind, hook in _HOOKS.items()
        if isinstance(module, kind) and type(module).forward is kind.forward and "forward" not in vars(module)
    ]


@contextmanager
def mask_questions_answered(model: nn.Module) -> Iterator[None]:
    """Set `is_causal` to False in the transformers of a model while this is open."""
    handles = patch_mask_checks(model)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Restore the attributes of all modules of a model at the end; in-place writes to tensors remain.

    A capture runs the model's Python with fake results. A model that stores a result, such as a mask for the next
    call, would otherwise keep an uninitialized tensor.
    """
    held: dict[int, tuple[Any, Any]] = {}
    for module in model.modules():
        _note(vars(module), held)
    try:
        yield
    finally:
        for container, contents in held.values():
            container.clear()
            if isinstance(container, (dict, set)):
                container.update(contents)
            else:
                container.extend(contents)


def _note(value: Any, held: dict[int, tuple[Any, Any]]) -> None:
    """Copy a container's content, and the containers in it."""
    if id(value) in held or not isinstance(value, (dict, list, set, deque, tuple)):
        return
    if not isinstance(value, tuple):
        held[id(value)] = value, value.copy()
    for one in value.values() if isinstance(value, dict) else value:
        _note(one, held)
