"""A functional graph computes with the original where it needs neither a copy nor another name."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from ort_dynamo.passes.fx.analysis.storage import storages_of
from ort_dynamo.passes.fx.analysis.views import ALIASES
from ort_dynamo.torch_internals.fakes import detect_fake_mode
from ort_dynamo.torch_internals.operators import OpOverload, aten
from ort_dynamo.torch_internals.symbols import known_true

__all__ = ["RemoveNoOps"]

_NO_OPS = (aten.clone.default, *ALIASES)


@dataclass(frozen=True)
class RemoveNoOps(PassBase):
    """`clone(x)`, `detach(x)` and `alias(x)` become `x` where x is computed, and no output is the result or its view.

    1. `clone`, where the copy has x's strides. The graph is functional, so nothing writes to the copy inside it. An
       output must stay a copy: its user may write to it. A copy of an input must stay one, too: AOTAutograd makes it
       for the backward, because the input is written to once the forward has run.
    2. `detach`, which torch 2.15 traces as `alias`. It is x to all but autograd, and autograd has seen the graph.
       Formulas of gradients read their own operator's result so, and a tanh's would be saved twice, under two names.
    """

    name: str = "remove_no_ops"

    def call(self, graph_module: GraphModule) -> PassResult:
        """Rewrite `graph_module` in place."""
        graph = graph_module.graph
        modified = False
        for node in [node for target in _NO_OPS for node in graph.find_nodes(op="call_function", target=target)]:
            source = node.args[0]
            if (
                _same_layout(source.meta["val"], node.meta["val"])
                and not _is_input(source)
                and not _reaches_output(node)
            ):
                users = list(node.users)
                node.replace_all_uses_with(source)
                _move_views(users, storages_of(node) - storages_of(source))  # of a detach there are none to move
                graph.erase_node(node)
                modified = True
        if modified:
            graph_module.recompile()
        return PassResult(graph_module, modified)


def _move_views(nodes: Iterable[Node], copied: set[int]) -> None:
    """Make fake values of `nodes` that are views into the copy's memory views into the original's.

    What shares an allocation is read off fake values afterwards.
    """
    for node in nodes:
        target: Any = node.target
        if (isinstance(target, OpOverload) or target is operator.getitem) and storages_of(node) & copied:
            values: Any = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            with detect_fake_mode(values) or nullcontext():
                node.meta["val"] = target(*values[0], **values[1])
            _move_views(node.users, copied)


def _same_layout(a: torch.Tensor, b: torch.Tensor) -> bool:
    return len(a.stride()) == len(b.stride()) and all(
        known_true(x == y) for x, y in zip(a.stride(), b.stride(), strict=True)
    )


def _is_input(node: Node) -> bool:
    """Ask whether `node` is an input of the graph or a view of one."""
    while node.op == "call_function" and _may_alias(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node.op in ("placeholder", "get_attr")


def _may_alias(node: Node) -> bool:
    """Ask whether the output of `node` may share memory with its inputs."""
    schema = getattr(node.target, "_schema", None)
    return schema is None or any(argument.alias_info is not None for argument in schema.arguments)


def _reaches_output(node: Node) -> bool:
    """Ask whether an output of the graph may share memory with `node`: reached through views alone."""
    for user in node.users:
        if user.op == "output":
            return True
        if _may_alias(user) and _reaches_output(user):
            return True
    return False
