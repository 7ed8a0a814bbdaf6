"""The line and module of the user's code that a node of an FX graph comes from."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from torch.fx import Node

__all__ = [
    "Owner",
    "covered_modules",
    "describe",
    "innermost_module",
    "module_path",
    "modules",
    "owners",
    "user_line",
]

_ROOT = re.compile(r"^(L\['\w+'\]|self)\.?")
"""Dynamo's prefix of a module's path: the local variable that holds the outermost module."""

_HELD = re.compile(r"\.__dict__\['_modules'\]\['([^']*)'\]")
"""Dynamo's spelling of a child of a module whose class has its own __getattr__, as those of peft have."""

_GLOBAL = re.compile(r"^G\['(\w+)'\]")
"""Dynamo's spelling of a global variable that holds the outermost module."""


def user_line(node: Node) -> str:
    """Return the innermost line of the user's code that `node` comes from."""
    trace = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if line.strip()]
    if not trace:
        return _without_line(node)
    places = [index for index, line in enumerate(trace) if line.startswith("File ")]
    of_program = [index for index in places if not trace[index].startswith(_FRONT_ENDS)]
    if places and not of_program:
        return _without_line(node)
    where = of_program[-1] if places else 0
    return " ".join(trace[where : where + 2])


_FRONT_ENDS = tuple(f'File "{Path(__file__).parents[1] / name}{os.sep}' for name in ("onnx_module", "training"))
"""The beginning of a line of our own front ends, which call the program's model."""


def _without_line(node: Node) -> str:
    """Return why a node has no line: torch records those of the program, and torch.nn calls its operators itself."""
    gradient = "" if node.meta.get("nn_module_stack") else "the gradient of "
    if module := module_path(node):
        return f"(no line of the program: {gradient}an operator that torch's module {module} calls itself)"
    return "(no source line: a gradient formula or a pass made the node, or the program runs by `python -c`)"


def modules(node: Node) -> tuple[tuple[str, str], ...]:
    """Give the modules that called the operator, outermost first: each one's path as in named_modules(), and its class.

    A backward's node has those of the forward's node whose gradient it computes. None outside of all modules.
    """
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    return tuple((_ROOT.sub("", _HELD.sub(r".\1", path)), _class_name(kind)) for path, kind in stack.values())


def _class_name(kind: str | type) -> str:
    return (kind if isinstance(kind, str) else kind.__name__).rpartition(".")[2]


def innermost_module(node: Node) -> tuple[str, str] | None:
    """Return the last of `modules`, or None."""
    return (modules(node) or (None,))[-1]


class Owner(NamedTuple):
    """The module that called an operator.

    Attributes:
        model: class of the outermost module; "" if the graph is not of one.
        path: the module's path in it, as in named_modules(); "" for itself.
        kind: its class; "" outside of all modules.
    """

    model: str
    path: str
    kind: str


def owners(node: Node) -> tuple[Owner, ...]:
    """Return the modules that called the operator, outermost first; one without a class if there are none."""
    found = modules(node)
    if not found:
        return (Owner("", "", ""),)
    outermost, model = found[0]
    return tuple(Owner("" if outermost else model, path, kind) for path, kind in found)


def module_path(node: Node) -> str:
    """Return the innermost module that called the operator: "layers.0.mlp (Linear)"; empty outside of modules."""
    path, kind = innermost_module(node) or ("", "")
    return f"{path} ({kind})".strip() if kind else ""


def covered_modules(nodes: Iterable[Node]) -> str:
    """Name the modules that nodes come from, in the nodes' order: "layers.0 to layers.3", "embedding, head" or "norm".

    Modules are named one level below the module that holds them all. Nodes outside of all modules do not count; where
    there are no others, their operators are named.
    """
    operators = [node for node in nodes if node.op == "call_function"]
    found = dict.fromkeys(module for node in operators if (module := innermost_module(node)) is not None)
    paths = [_GLOBAL.sub(r"\1", path).split(".") for path, _ in found if path]
    if not paths:
        return _first_to_last([kind for _, kind in found] or [_operator_name(node) for node in operators])
    shared = [level[0] for level in takewhile(lambda level: len({*level}) == 1, zip(*paths, strict=False))]
    inside = [path for path in paths if path != shared] or paths
    return _first_to_last([".".join(path[: len(shared) + 1]) for path in inside])


def _first_to_last(names: Sequence[str]) -> str:
    each = list(dict.fromkeys(names))
    return ", ".join(each) if len(each) < 3 else f"{each[0]} to {each[-1]}"


def _operator_name(node: Node) -> str:
    return getattr(node.target, "__name__", str(node.target)).partition(".")[0]


def describe(node: Node) -> str:
    """Return the operator, the module and the user's line, as text of one or two lines."""
    module = module_path(node)
    return f"{node.target}{f' of {module}' if module else ''}\n  {user_line(node)}"
