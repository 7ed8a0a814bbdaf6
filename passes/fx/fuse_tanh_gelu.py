"""Replace a GELU by tanh that a program writes in elementary operators, and its gradient, by torch's operators."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from ort_dynamo.passes.fx.analysis.fake_values import add_call, derived_meta
from ort_dynamo.passes.fx.analysis.saved_tensors import calls, tagged_alike
from ort_dynamo.torch_internals.kernels.operators import aten

__all__ = ["FuseTanhGelu"]

_Row = tuple[str, Any, tuple[Any, ...]]
"""(a name, an operator, its arguments: names of earlier rows, or scalars)."""

_SCALE, _CUBE = math.sqrt(2 / math.pi), 0.044715

_FORWARD: tuple[_Row, ...] = (
    ("cube", aten.pow, ("x", 3.0)),
    ("bent", aten.mul, ("cube", _CUBE)),
    ("inner", aten.add, ("x", "bent")),
    ("scaled", aten.mul, ("inner", _SCALE)),
    ("tanh", aten.tanh, ("scaled",)),
    ("above", aten.add, ("tanh", 1.0)),
    ("half", aten.mul, ("x", 0.5)),
    ("y", aten.mul, ("half", "above")),
)
"""x / 2 (1 + tanh(√(2/π) (x + 0.044715 x³)))."""

_BACKWARD: tuple[_Row, ...] = (
    ("to_half", aten.mul, ("dy", "above")),
    ("from_half", aten.mul, ("to_half", 0.5)),
    ("to_inner", aten.mul, ("to_scaled", _SCALE)),
    ("to_cube", aten.mul, ("to_inner", _CUBE)),
    ("square", aten.pow, ("x", 2.0)),
    ("slope", aten.mul, ("square", 3.0)),
    ("from_cube", aten.mul, ("to_cube", "slope")),
    ("from_inner", aten.add, ("to_inner", "from_cube")),
    ("dx", aten.add, ("from_inner", "from_half")),
)
"""Its gradient as autograd writes it, after `to_scaled`, the gradient of tanh."""

_SYMMETRIC = (aten.add, aten.mul)


@dataclass(frozen=True)
class FuseTanhGelu(PassBase):
    """Rewrite the formula of GELU's approximation by tanh, as GPT-2 writes it, as `gelu(x, approximate="tanh")`.

    Of a joint graph, its gradient becomes `gelu_backward`, so that the backward reads x alone, and neither tanh nor the
    factors beside it are saved. In a session, these are one kernel and 16 nodes instead of 8 and 12, all of which pass
    over memory.

    The conditions are:

    1. x is float32: in half dtypes a program sees the rounding of each operator;
    2. nothing but the formula reads a value between x and the result, nor one between the two gradients;
    3. all nodes of the forward, or none, are tagged for recomputation.
    """

    name: str = "fuse_tanh_gelu"

    def call(self, graph_module: GraphModule) -> PassResult:
        """Rewrite a joint or inference graph in place."""
        graph = graph_module.graph
        cubes = graph.find_nodes(op="call_function", target=aten.pow.Tensor_Scalar)
        modified = False
        for x in dict.fromkeys(cube.args[0] for cube in cubes if _equal(cube.args[1], 3.0)):
            forward = _match(_FORWARD, {"x": x})
            if forward is None:
                continue
            backward = _gradient(forward)
            if _may_go(forward, backward):
                _replace(forward["y"], aten.gelu.default, (x,))
                if backward:
                    _replace(backward["dx"], aten.gelu_backward.default, (backward["dy"], x))
                gone = {*forward.values(), *backward.values()} - {x, backward.get("dy")}
                for node in [one for one in reversed(graph.nodes) if one in gone]:
                    graph.erase_node(node)
                modified = True
        if modified:
            graph_module.recompile()
        return PassResult(graph_module, modified)


def _match(rows: Sequence[_Row], known: dict[str, Node]) -> dict[str, Node] | None:
    """Find a node for each row, and return them with those that are known; None if one is missing."""
    found = dict(known)
    for name, operator, arguments in rows:
        wanted = [found.get(one, one) for one in arguments]
        node = next(_calls(operator, wanted), None)
        if node is None:
            return None
        found[name] = node
    return found


def _calls(operator: Any, wanted: Sequence[Any]) -> Iterator[Node]:
    """Find the calls of an operator with these arguments, the first of which is a node."""
    for user in wanted[0].users:
        if not calls(user, (operator,)) or user.kwargs:
            continue
        orders = [user.args, user.args[::-1]] if operator in _SYMMETRIC else [user.args]
        if any(len(order) == len(wanted) and all(map(_equal, order, wanted)) for order in orders):
            yield user


def _equal(argument: Any, wanted: Any) -> bool:
    if isinstance(wanted, Node) or isinstance(argument, Node):
        return argument is wanted
    # Equal in float32: a program may write fewer digits.
    return type(argument) in (int, float) and math.isclose(argument, wanted, rel_tol=1e-9)


def _gradient(forward: dict[str, Node]) -> dict[str, Node]:
    """Find the nodes of the gradient, or none."""
    tanh, half = forward["tanh"], forward["half"]
    for to_scaled in (user for user in tanh.users if calls(user, (aten.tanh_backward,))):
        to_above: Any = to_scaled.args[0]
        if not calls(to_above, (aten.mul,)) or half not in to_above.args:
            continue
        counts = Counter(to_above.args)
        counts[half] -= 1
        (dy,) = counts.elements()
        known = {**forward, "dy": dy, "to_above": to_above, "to_scaled": to_scaled}
        found = _match(_BACKWARD, known) if isinstance(dy, Node) else None
        if found is not None:
            return {name: node for name, node in found.items() if name not in forward}
    return {}


def _may_go(forward: Mapping[str, Node], backward: Mapping[str, Node]) -> bool:
    """Check that the nodes are float32, that nothing else reads a value between, and that they are tagged alike."""
    inner = [node for name, node in forward.items() if name not in ("x", "y")]
    between = [node for name, node in backward.items() if name not in ("dy", "dx")]
    known = {*forward.values(), *backward.values()}
    return (
        all(node.meta["val"].dtype == torch.float32 for node in known)
        and all(user in known for node in (*inner, *between) for user in node.users)
        and all(tagged_alike(node, forward["y"]) for node in inner)
    )


def _replace(node: Node, operator: Any, arguments: tuple[Node, ...]) -> None:
    with node.graph.inserting_before(node):
        made = add_call(node.graph, operator, arguments, {"approximate": "tanh"}, derived_meta(node))
    node.replace_all_uses_with(made)
