"""Nested tuples, lists and dicts of values, as torch itself walks them."""

from __future__ import annotations

# Every tested version has them here; torch's own documentation of export names them.
from torch.utils._pytree import SUPPORTED_NODES, tree_leaves, tree_map

__all__ = ["is_container", "tree_leaves", "tree_map"]


def is_container(kind: type) -> bool:
    """Check whether a class is registered with torch as a container of values."""
    return kind in SUPPORTED_NODES
