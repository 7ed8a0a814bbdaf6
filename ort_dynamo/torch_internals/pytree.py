"""Nested tuples, lists and dicts of values, as torch itself walks them."""

from __future__ import annotations

# Every tested version has them here; torch's own documentation of export names them.
from torch.utils._pytree import tree_leaves, tree_map

__all__ = ["tree_leaves", "tree_map"]
