"""AOTAutograd must leave some writes to inputs in the graphs that it makes.

The others it takes out: a written input is one more result, which is copied back when the graph has run.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

from torch.fx import GraphModule, Node

from ort_dynamo.torch_internals.kernels.operators import (
    OpOverload,
    OpOverloadPacket,
    higher_order,
    is_mutable,
    overloads_of,
)

__all__ = ["keeps_input_writes"]

_IN_PLACE = frozenset(
    f for name, f in vars(operator).items() if name[0] == "i" and {name[1:], f"{name[1:]}_"} & vars(operator).keys()
) | {operator.setitem}
"""`operator.iadd` for `operator.add`, `operator.iand` for `operator.and_`, and so on."""


_REPLACING = frozenset({"set_", "shallow_copy_data_", "resize_storage_bytes_", "tracable_create_parameter"})
"""Dynamo's operators that give an input other memory.

torch 2.15 writes `x.data = y` as the second, older ones as the first.
"""


def keeps_input_writes(gm: GraphModule) -> bool:
    """Decide whether the writes to the inputs of Dynamo's graph stay in AOTAutograd's graphs.

    - An input may get other memory: AOTAutograd takes `set_` and the like only there.
    - An autograd.Function may write in its backward: the value that a backward leaves in an input that the forward
      writes too would be the forward's result.
    """
    return _replaces_storage(gm) or any(_writes(node) for body in _own_backwards(gm) for node in body.graph.nodes)


def _replaces_storage(gm: GraphModule) -> bool:
    """Check whether an input gets new storage, by `x.data = y` or torch.nn.Parameter(y)."""
    names = {getattr(node.target, "__name__", str(node.target)).partition(".")[0] for node in gm.graph.nodes}
    return not names.isdisjoint(_REPLACING)


def _own_backwards(gm: GraphModule) -> Iterator[GraphModule]:
    """Yield the graphs that the autograd.Functions in `gm` run backward, with all graphs inside them."""
    for owner in gm.modules():
        if not isinstance(owner, GraphModule):
            continue
        for node in owner.graph.find_nodes(op="call_function", target=higher_order.autograd_function_apply, sort=False):
            body = owner.get_submodule(str(node.args[1].target))
            yield from (m for m in body.modules() if isinstance(m, GraphModule))


def _writes(node: Node) -> bool:
    """Check whether a node of Dynamo's writes to one of its arguments."""
    if node.op not in ("call_function", "call_method"):
        return False
    if isinstance(node.target, OpOverload):
        return is_mutable(node.target)
    if isinstance(node.target, OpOverloadPacket):
        return any(map(is_mutable, overloads_of(node.target)))
    name = str(getattr(node.target, "__name__", node.target))
    return node.target in _IN_PLACE or "out" in node.kwargs or (name.endswith("_") and not name.endswith("__"))
