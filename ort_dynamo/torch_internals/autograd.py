"""Ask torch's autograd whether it computes gradients now, whether it still can, and whether hooks save tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ort_dynamo.torch_internals.lookup import private

__all__ = ["gradients_unless_freed", "in_backward", "saves_by_hooks"]

_graph_task = private("torch._C:_current_graph_task_id", lambda: -1)
_hooks = private("torch._C._autograd:_top_saved_tensors_default_hooks", lambda ignores_tracing: ())


def in_backward() -> bool:
    """Check whether the calling thread runs a part of a backward; without torch's function: no."""
    return bool(_graph_task() != -1)


def saves_by_hooks() -> bool:
    """Check whether torch.autograd.graph.saved_tensors_hooks are set; without torch's function: yes."""
    return _hooks(True) is not None


def gradients_unless_freed(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], cotangents: Sequence[torch.Tensor]
) -> tuple[torch.Tensor | None, ...] | None:
    """Compute gradients, or return None if an earlier backward has freed the saved tensors."""
    try:
        return torch.autograd.grad(outputs, inputs, cotangents, allow_unused=True)
    except RuntimeError as error:  # torch has no question for this
        if _FREED not in str(error):
            raise
        return None


_FREED = "backward through the graph a second time"
