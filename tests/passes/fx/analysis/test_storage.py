"""Tests of the allocations in a value: those of sparse tensors are their parts'."""

from __future__ import annotations

import pytest
import torch

from ort_dynamo.passes.fx.analysis.storage import fakes_in

PARTS = {
    torch.strided: [lambda x: x],
    torch.sparse_coo: [torch.Tensor._indices, torch.Tensor._values],
    torch.sparse_csr: [torch.Tensor.crow_indices, torch.Tensor.col_indices, torch.Tensor.values],
    torch.sparse_csc: [torch.Tensor.ccol_indices, torch.Tensor.row_indices, torch.Tensor.values],
    torch.sparse_bsr: [torch.Tensor.crow_indices, torch.Tensor.col_indices, torch.Tensor.values],
    torch.sparse_bsc: [torch.Tensor.ccol_indices, torch.Tensor.row_indices, torch.Tensor.values],
}


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state")
@pytest.mark.parametrize("layout", PARTS, ids=str)
def test_the_memory_of_a_tensor_is_that_of_its_dense_parts(layout: torch.layout) -> None:
    blocks = (2, 2) if layout in (torch.sparse_bsr, torch.sparse_bsc) else None
    tensor = torch.eye(4) if layout is torch.strided else torch.eye(4).to_sparse(layout=layout, blocksize=blocks)
    places = [part(tensor).untyped_storage().data_ptr() for part in PARTS[layout]]
    assert [part.untyped_storage().data_ptr() for part in fakes_in(tensor)] == places
    assert [part.untyped_storage().data_ptr() for part in fakes_in((None, [tensor], 1))] == places
