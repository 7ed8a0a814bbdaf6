"""Ask torch's autograd about the calling thread: whether it computes gradients, and whether hooks save tensors."""

from __future__ import annotations

from ort_dynamo.torch_internals.lookup import private

__all__ = ["in_backward", "saves_by_hooks"]

_graph_task = private("torch._C:_current_graph_task_id", lambda: -1)
_hooks = private("torch._C._autograd:_top_saved_tensors_default_hooks", lambda ignores_tracing: ())


def in_backward() -> bool:
    """Check whether the calling thread runs a part of a backward; without torch's function: no."""
    return bool(_graph_task() != -1)


def saves_by_hooks() -> bool:
    """Check whether torch.autograd.graph.saved_tensors_hooks are set; without torch's function: yes."""
    return _hooks(True) is not None
