"""Python's random numbers in a graph: Dynamo passes them as 0-d float64 tensors."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ort_dynamo.torch_internals.tracing.dynamo import is_random_number

__all__ = ["in_full_precision"]


def in_full_precision(gm: GraphModule, example_inputs: Sequence[Any]) -> list[Any]:
    """Make the graph's input of each random float float64, as at run time.

    torch 2.13 traces the input in the default dtype and passes it as float64. After this function, operators that
    compute in float64 read it without a cast, as in eager. Other operators read it in the dtype that Dynamo saw, so
    every result keeps its dtype.

    torch 2.15 traces the input as float64. A 0-d float64 tensor promotes a result to float64 where a Python float does
    not: with integers, and with other 0-d tensors. There the input is cast to the dtype that a Python float gives.

    Args:
        gm: Dynamo's graph, changed in place.
        example_inputs: one value per placeholder.

    Returns:
        The example inputs, with the random floats in float64.
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


def _cast_where_seen(number: Node, last_placeholder: Node, dtype: torch.dtype) -> None:
    graph = number.graph
    with graph.inserting_after(last_placeholder):
        cast = graph.call_method("to", (number, dtype))
    cast.meta["example_value"] = number.meta["example_value"]
    number.meta["example_value"] = cast.meta["example_value"].double()
    number.replace_all_uses_with(cast, delete_user_cb=lambda user: user is not cast and not _takes_float64(user))
    if not cast.users:
        graph.erase_node(cast)


def _cast_where_too_wide(number: Node, last_placeholder: Node) -> bool:
    """Cast the scalar, which is float64, for nodes that a Python float would not make float64; True if it did so."""
    narrow = {user: dtype for user in number.users if (dtype := _dtype_left(user, number)) is not None}
    for dtype in dict.fromkeys(narrow.values()):
        with number.graph.inserting_after(last_placeholder):
            cast = number.graph.call_method("to", (number, dtype))
        cast.meta["example_value"] = number.meta["example_value"].to(dtype)
        takers = {user for user, one in narrow.items() if one is dtype}
        number.replace_all_uses_with(cast, delete_user_cb=takers.__contains__)
    return bool(narrow)


def _dtype_left(user: Node, number: Node) -> torch.dtype | None:
    """Return the dtype `user` would have if the input were a Python float; None if it has that dtype."""
    values = [node.meta.get("example_value") for node in user.all_input_nodes if node is not number]
    others = {value.dtype for value in values if isinstance(value, torch.Tensor)}
    result = user.meta.get("example_value")
    wide = isinstance(result, torch.Tensor) and result.dtype is torch.float64
    if not wide or not others or torch.float64 in others:
        return None
    floating = [dtype for dtype in others if dtype.is_floating_point]
    return functools.reduce(torch.promote_types, floating) if floating else torch.get_default_dtype()


def _takes_float64(user: Node) -> bool:
    """Check whether `user` reads a random float without a cast: its result is float64, or it is the output."""
    result = user.meta.get("example_value")
    return user.op == "output" or (isinstance(result, torch.Tensor) and result.dtype is torch.float64)
