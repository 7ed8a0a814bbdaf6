"""Views: nodes whose results live in memory that was there before.

Two questions are asked of a node. `is_view` asks the fake tensors whether it makes memory at all, for any operator:
that decides the cost of a saved tensor. `is_remakable_view` asks the operator whether another graph can make the
same view of the same base: that decides which node crosses a boundary.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from ort_dynamo.passes.fx.analysis.storage import storages_of
from ort_dynamo.torch_internals.kernels.view_operators import MULTI_VIEWS, VIEWS
from ort_dynamo.torch_internals.sizes.symbols import known_true

__all__ = [
    "is_expanded",
    "is_given_by_island",
    "is_remakable_view",
    "is_view",
    "maker_of",
]


def is_view(node: Node) -> bool:
    """Check whether a node only makes views: all its tensors live in allocations of its inputs. A getitem counts."""
    if node.op != "call_function":
        return False
    given: set[int] = set().union(*map(storages_of, node.all_input_nodes))
    return node.target is operator.getitem or storages_of(node) <= given


def maker_of(node: Node) -> Node:
    """Return the node that made the allocation of a tensor node: `node` itself, or the base of its view."""
    while is_view(node):
        own = storages_of(node)
        node = next(source for source in node.all_input_nodes if storages_of(source) & own)
    return node


def is_remakable_view(node: Node) -> bool:
    """Check whether `node` is one of VIEWS, or one of the views that a MULTI_VIEWS node gives.

    A reader on the other side of a boundary can rebuild such a view from its first argument.
    """
    if node.target is operator.getitem:
        return isinstance(node.args[0], Node) and node.args[0].target in MULTI_VIEWS
    return node.target in VIEWS or node.target in MULTI_VIEWS


def is_given_by_island(node: Node) -> bool:
    """Check whether a node of an outer graph is a result of an island."""
    return node.target is operator.getitem and node.all_input_nodes[0].op == "call_module"


def is_expanded(fake: torch.Tensor, axis: int) -> bool:
    """Check whether a tensor is known to have one element in memory for several along `axis`."""
    return known_true(fake.stride(axis) == 0) and not known_true(fake.shape[axis] == 1)
