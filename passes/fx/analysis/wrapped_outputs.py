"""Passes outputs of an outer graph through functions that give them back with other metadata."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import GraphModule, Node

__all__ = ["wrap_outputs"]


def wrap_outputs(
    graph_module: GraphModule,
    which: slice,
    function: Callable[..., Any],
    arguments: Callable[[int, Node], tuple[Any, ...] | None],
) -> bool:
    """Replace outputs by a function of them; return whether there were any.

    Args:
        graph_module: an outer graph with fake values, rewritten in place. Repeated outputs are wrapped once.
        which: the outputs that may be wrapped.
        function: the function, with an output as first argument; it keeps the fake value.
        arguments: index and node of an output -> the other arguments, or None to leave the output.
    """
    graph = graph_module.graph
    (output,) = graph.find_nodes(op="output")
    values: list[Any] = [*output.args[0]]
    made: dict[Node, Node] = {}
    for index in range(*which.indices(len(values))):
        value = values[index]
        if not isinstance(value, Node) or value.op != "call_function" or value.target is function:
            continue
        others = arguments(index, value)
        if others is None:
            continue
        if value not in made:
            with graph.inserting_before(output):
                made[value] = graph.call_function(function, (value, *others))
            made[value].meta = dict(value.meta)
        values[index] = made[value]
    if made:
        output.args = (type(output.args[0])(values),)
        graph_module.recompile()
    return bool(made)
