"""Where in the user's code a node of an FX graph comes from."""

from __future__ import annotations

import re

from torch.fx import Node

__all__ = ["describe", "module_path", "user_line"]

_ROOT = re.compile(r"^(L\['\w+'\]|self)\.?")
"""What Dynamo writes before a module's path: the local variable that holds the outermost module."""


def user_line(node: Node) -> str:
    """The innermost line of the user's code that `node` comes from."""
    trace = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if line.strip()]
    if not trace:
        return "(no source line: the node was made by a gradient formula)"
    where = next((i for i in range(len(trace) - 1, -1, -1) if trace[i].startswith("File ")), 0)
    return " ".join(trace[where : where + 2])


def module_path(node: Node) -> str:
    """The innermost module that called the operator, as in named_modules(), with its class: "layers.0.mlp (Linear)".

    A backward's node has that of the forward's node whose gradient it computes. Empty outside of all modules.
    """
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    if not stack:
        return ""
    path, kind = list(stack.values())[-1]
    name = kind if isinstance(kind, str) else kind.__name__
    return f"{_ROOT.sub('', path)} ({name.rpartition('.')[2]})".strip()


def describe(node: Node) -> str:
    """The operator, the module and the user's line, as text of one or two lines."""
    module = module_path(node)
    return f"{node.target}{f' of {module}' if module else ''}\n  {user_line(node)}"
