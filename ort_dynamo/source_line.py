"""Where in the user's code a node of an FX graph comes from."""

from __future__ import annotations

from torch.fx import Node

__all__ = ["user_line"]


def user_line(node: Node) -> str:
    """The innermost line of the user's code that `node` comes from."""
    trace = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if line.strip()]
    if not trace:
        return "(no source line: the node was made by a gradient formula)"
    where = next((i for i in range(len(trace) - 1, -1, -1) if trace[i].startswith("File ")), 0)
    return " ".join(trace[where : where + 2])
