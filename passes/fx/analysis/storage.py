"""The allocations of the values of a graph's nodes, read off their fake tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from ort_dynamo.torch_internals.fakes import storage_identity
from ort_dynamo.torch_internals.pytree import tree_leaves

__all__ = ["fakes_in", "storage_of", "storages_of"]


def fakes_in(tree: Any) -> list[torch.Tensor]:
    """Return the tensors among a value's leaves; of a sparse one, which owns no memory, the dense parts."""
    leaves = (tree,) if isinstance(tree, torch.Tensor) else tree_leaves(tree)  # most nodes make one tensor
    return [part for leaf in leaves if isinstance(leaf, torch.Tensor) for part in _dense_parts(leaf)]


def _dense_parts(fake: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if fake.layout is torch.strided:
        return (fake,)
    if fake.layout is torch.sparse_coo:
        return fake._indices(), fake._values()
    if fake.layout in (torch.sparse_csr, torch.sparse_bsr):
        return fake.crow_indices(), fake.col_indices(), fake.values()
    if fake.layout in (torch.sparse_csc, torch.sparse_bsc):
        return fake.ccol_indices(), fake.row_indices(), fake.values()
    return (fake,)


def storage_of(node: Node) -> int:
    """Return the allocation of a tensor node's value."""
    return storage_identity(node.meta["val"])


def storages_of(node: Node) -> set[int]:
    """Return the allocations of all tensors in a node's value, which may be a tuple."""
    return {storage_identity(fake) for fake in fakes_in(node.meta.get("val"))}
