"""The allocations of the values of a graph's nodes, read off their fake tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from ort_dynamo.torch_internals.fakes import storage_identity
from ort_dynamo.torch_internals.pytree import tree_leaves
from ort_dynamo.torch_internals.sizes.symbols import known_equal

__all__ = ["are_laid_out_alike", "fakes_in", "storage_of", "storages_of"]


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


def are_laid_out_alike(first: torch.Tensor, second: torch.Tensor, *, by_place: bool) -> bool:
    """Check whether two tensors of one shape have the same strides, and the same bits of conjugation and negation.

    Args:
        by_place: whether they must begin at the same place of their storage, too: `as_strided` counts from there.
    """
    layouts = [(*one.stride(), *((one.storage_offset(),) if by_place else ())) for one in (first, second)]
    bits = [(one.is_conj(), one.is_neg()) for one in (first, second)]
    return known_equal(*layouts) and bits[0] == bits[1]


def storage_of(node: Node) -> int:
    """Return the allocation of a tensor node's value."""
    return storage_identity(node.meta["val"])


def storages_of(node: Node) -> set[int]:
    """Return the allocations of all tensors in a node's value, which may be a tuple."""
    return {storage_identity(fake) for fake in fakes_in(node.meta.get("val"))}
