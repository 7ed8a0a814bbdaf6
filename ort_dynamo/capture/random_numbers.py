"""Dynamo feeds the numbers that a program draws with Python's `random` to a graph as 0-d tensors, in float64."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ort_dynamo.torch_internals.dynamo import is_random_number

__all__ = ["in_full_precision"]


def in_full_precision(gm: GraphModule, example_inputs: Sequence[Any]) -> list[Any]:
    """Make each drawn float the float64 input that arrives when the graph runs.

    torch 2.13 traces it as a tensor of the default dtype and feeds it as float64. Operators that compute in float64 now
    take it as it is, as in eager; all others take it in the dtype that Dynamo saw, so every result keeps its dtype.
    torch 2.15 traces it as float64, and a 0-d tensor of that makes a result float64 where a Python float does not: with
    integers, and with other 0-d tensors. There it is taken in the dtype that a Python float leaves.

    Args:
        gm: Dynamo's graph, changed in place.
        example_inputs: one value per placeholder.

    Returns:
        The example inputs, with the drawn floats in float64.
    """
    inputs = list(example_inputs)
    placeholders = gm.graph.find_nodes(op="placeholder")
    changed = False
    for index, (node, value) in enumerate(zip(placeholders, inputs, strict=True)):
        if not is_random_number(node) or not value.is_floating_point():
            continue
        if value.dtype is not torch.float64:
            inputs[index] = value.double()
            _cast_where_seen(node, placeholders[-1], value.dtype)
            changed = True
        elif torch.get_default_dtype() is not torch.float64:
            changed |= _cast_where_too_wide(node, placeholders[-1])
    if changed:
        gm.recompile()
    return inputs


def _cast_where_seen(drawn: Node, last_placeholder: Node, dtype: torch.dtype) -> None:
    graph = drawn.graph
    with graph.inserting_after(last_placeholder):
        cast = graph.call_method("to", (drawn, dtype))
    cast.meta["example_value"] = drawn.meta["example_value"]
    drawn.meta["example_value"] = cast.meta["example_value"].double()
    drawn.replace_all_uses_with(cast, delete_user_cb=lambda user: user is not cast and not _takes_float64(user))
    if not cast.users:
        graph.erase_node(cast)


def _cast_where_too_wide(drawn: Node, last_placeholder: Node) -> bool:
    """Cast the scalar, which is float64, for nodes that a Python float would not make float64; True if it did so."""
    narrow = {user: dtype for user in drawn.users if (dtype := _dtype_left(user, drawn)) is not None}
    for dtype in dict.fromkeys(narrow.values()):
        with drawn.graph.inserting_after(last_placeholder):
            cast = drawn.graph.call_method("to", (drawn, dtype))
        cast.meta["example_value"] = drawn.meta["example_value"].to(dtype)
        takers = {user for user, one in narrow.items() if one is dtype}
        drawn.replace_all_uses_with(cast, delete_user_cb=takers.__contains__)
    return bool(narrow)


def _dtype_left(user: Node, drawn: Node) -> torch.dtype | None:
    """Return the dtype `user` would have if the number were a Python float; None if it has that dtype."""
    values = [node.meta.get("example_value") for node in user.all_input_nodes if node is not drawn]
    others = {value.dtype for value in values if isinstance(value, torch.Tensor)}
    result = user.meta.get("example_value")
    wide = isinstance(result, torch.Tensor) and result.dtype is torch.float64
    if not wide or not others or torch.float64 in others:
        return None
    floating = [dtype for dtype in others if dtype.is_floating_point]
    return functools.reduce(torch.promote_types, floating) if floating else torch.get_default_dtype()


def _takes_float64(user: Node) -> bool:
    """Ask whether `user` takes a drawn number as it is: for a result in float64, or as the graph's own result."""
    result = user.meta.get("example_value")
    return user.op == "output" or (isinstance(result, torch.Tensor) and result.dtype is torch.float64)
