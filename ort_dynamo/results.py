"""Gives small results memory that torch owns: what ONNX Runtime allocated cannot be resized in place.

`result.resize_(…)` and `torch.add(…, out=result)` work on them as on eager's then. A copy of that size costs about a
microsecond. Larger results stay in ONNX Runtime's arena: allocated by torch, each step would touch fresh pages
(GPT-2's step took 1.17 times as long).
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ort_dynamo.boundary import promised_strides
from ort_dynamo.islands import is_view

__all__ = ["own_results", "owned"]

_SMALL = 1 << 16
"""Bytes."""


def owned(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, in memory of torch's own if it is small."""
    return tensor.clone() if tensor.nbytes <= _SMALL else tensor


def own_results(gm: GraphModule, seen: slice) -> None:
    """Have those outputs of an outer graph that the program sees be `owned`, in place; views share memory as before.

    Args:
        gm: an outer graph with fake values, in which an island is a call_module node.
        seen: which of its outputs; the others are written back to inputs, or saved for the backward.
    """
    (output,) = gm.graph.find_nodes(op="output")
    values: tuple[Any, ...] = output.args[0]
    bases = (_base(value) for value in values[seen] if isinstance(value, Node))
    for item in dict.fromkeys(bases):
        if not _comes_from_island(item) or promised_strides(item.meta["val"]):  # torch's already
            continue
        users = list(item.users)
        with gm.graph.inserting_after(item):
            copied = gm.graph.call_function(owned, (item,))
        copied.meta = dict(item.meta)
        for user in users:
            user.replace_input_with(item, copied)


def _comes_from_island(node: Node) -> bool:
    return node.target is operator.getitem and node.all_input_nodes[0].op == "call_module"


def _base(value: Node) -> Node:
    while is_view(value):
        (value, *_) = value.all_input_nodes
    return value
