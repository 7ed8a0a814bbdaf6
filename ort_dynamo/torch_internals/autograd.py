"""Asks torch's autograd whether it computes gradients now, whether it still can, and whether hooks save tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ort_dynamo.torch_internals.lookup import private

__all__ = ["gradients_unless_freed", "in_backward", "saves_by_hooks", "set_version"]

_graph_task = private("torch._C:_current_graph_task_id", lambda: -1)
_hooks = private("torch._C._autograd:_top_saved_tensors_default_hooks", lambda ignores_tracing: ())

_set_versions = private("torch._C._autograd:_unsafe_set_version_counter", lambda tensors, versions: None)


def in_backward() -> bool:
    """Check whether the calling thread runs a part of a backward; without torch's function: no."""
    return bool(_graph_task() != -1)


def saves_by_hooks() -> bool:
    """Check whether torch.autograd.graph.saved_tensors_hooks are set; without torch's function: yes."""
    return _hooks(True) is not None


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Set a tensor's count of writes to what it was when it had the same numbers; without torch's function: do nothing.

    A backward that is pending compares it with the one that it saved.
    """
    _set_versions((tensor,), (version,))


def gradients_unless_freed(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], cotangents: Sequence[torch.Tensor]
) -> tuple[torch.Tensor | None, ...] | None:
    """Compute gradients of leaves, or return None if an earlier backward has freed the saved tensors."""
    try:
        if _is_checkpointed(outputs):
            return _accumulated(outputs, inputs, cotangents)
        return torch.autograd.grad(outputs, inputs, cotangents, allow_unused=True)
    except RuntimeError as error:  # torch has no question for this
        if _FREED not in str(error):
            raise
        return None


_FREED = "backward through the graph a second time"


def _is_checkpointed(outputs: Sequence[torch.Tensor]) -> bool:
    """Check for `checkpoint(use_reentrant=True)`, which runs in a plain backward() alone."""
    seen, waiting = set(), [one.grad_fn for one in outputs]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if node.name().startswith("CheckpointFunction"):
            return True
        seen.add(node)
        waiting += [one for one, _ in node.next_functions]
    return False


def _accumulated(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], cotangents: Sequence[torch.Tensor]
) -> tuple[torch.Tensor | None, ...]:
    before = [one.grad for one in inputs]
    for one in inputs:
        one.grad = None
    try:
        torch.autograd.backward(outputs, cotangents)
        return tuple(one.grad for one in inputs)
    finally:
        for one, gradient in zip(inputs, before, strict=True):
            one.grad = gradient
