"""Numbers that the program draws with Python's `random`, which Dynamo feeds to a graph as 0-d tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._dynamo.source import RandomValueSource
from torch.fx import GraphModule, Node

__all__ = ["in_full_precision"]


def in_full_precision(gm: GraphModule, example_inputs: Sequence[Any]) -> list[Any]:
    """Make each drawn float the float64 input that arrives when the graph runs.

    Dynamo traces it as a tensor of the default dtype and feeds it as float64. What computes in float64 now takes it
    as it is, as in eager; all else takes it in the dtype that Dynamo saw, so every result keeps its dtype.

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
        drawn = isinstance(getattr(node, "_dynamo_source", None), RandomValueSource)
        if drawn and value.is_floating_point() and value.dtype is not torch.float64:
            inputs[index] = value.double()
            _cast_where_seen(node, placeholders[-1], value.dtype)
            changed = True
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


def _takes_float64(user: Node) -> bool:
    """Whether a drawn number goes in as it is: into a result in float64, and out of the graph."""
    result = user.meta.get("example_value")
    return user.op == "output" or (isinstance(result, torch.Tensor) and result.dtype is torch.float64)
