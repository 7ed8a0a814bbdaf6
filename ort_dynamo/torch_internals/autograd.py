"""Ask torch's autograd whether it computes gradients at this moment."""

from __future__ import annotations

from ort_dynamo.torch_internals.lookup import private

__all__ = ["in_backward"]

_graph_task = private("torch._C:_current_graph_task_id", lambda: -1)


def in_backward() -> bool:
    """Check whether the calling thread runs a part of a backward; without torch's function: no."""
    return bool(_graph_task() != -1)
