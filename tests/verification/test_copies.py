"""Copies of a call's tensors share memory and take part in autograd as the tensors do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from ort_dynamo.torch_internals.fakes import storage_identity
from ort_dynamo.verification.copies import Copies, UncheckableError


def copies_of(*values: Any) -> Copies:
    return Copies(values, lambda _: False)


def test_a_result_of_an_operator_is_copied_as_one_and_its_gradient_goes_to_a_leaf() -> None:
    given = (torch.ones(3, 2, requires_grad=True) * 2).t()
    copies = copies_of(given)
    (made,) = copies.values
    leaf = copies.leaf_of(made)
    assert (made.is_leaf, made.requires_grad, made.stride()) == (False, True, (1, 2))
    made.mul_(3)
    (gradient,) = torch.autograd.grad(made.sum(), leaf)
    assert torch.equal(gradient, torch.full((2, 3), 3.0))
    assert torch.equal(given, torch.full((2, 3), 2.0))


def test_a_leaf_is_copied_as_a_leaf() -> None:
    (made, plain) = (copies := copies_of(torch.ones(2, requires_grad=True), torch.ones(2))).values
    assert copies.leaf_of(made) is made
    assert (made.is_leaf, made.requires_grad, plain.requires_grad) == (True, True, False)


def test_tensors_without_an_overlap_have_gradients_of_their_own() -> None:
    parts = (torch.ones(2, 6, requires_grad=True) * 1).chunk(3, -1)
    copies = copies_of(*parts)
    assert len({storage_identity(one) for one in copies.values}) == 1
    assert [copies.leaf_of(one).shape for one in copies.values] == [(2, 2)] * 3
    assert len({id(copies.leaf_of(one)) for one in copies.values}) == 3


@pytest.mark.parametrize("with_gradient", [False, True])
def test_views_that_overlap_are_views_of_one_copy(with_gradient: bool) -> None:
    base = torch.arange(6.0, requires_grad=with_gradient) * 1
    first, second, whole = (copies := copies_of(base[:4], base[2:], base)).values
    first.mul_(2)
    assert first._base is second._base is whole
    assert second.tolist() == [4.0, 6.0, 4.0, 5.0]
    assert base.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    if with_gradient:
        (gradient,) = torch.autograd.grad(second.sum(), copies.leaf_of(first))
        assert gradient.tolist() == [0.0, 0.0, 2.0, 2.0, 1.0, 1.0]
        assert copies.leaf_of(first) is copies.leaf_of(second) is copies.leaf_of(whole)


def test_memory_is_shared_without_a_common_base() -> None:
    given = torch.zeros(4)
    one, other = copies_of(given, torch.from_numpy(given.numpy()), given.detach()[1:]).values[::2]
    other.add_(1)
    assert one.tolist() == [0.0, 1.0, 1.0, 1.0]


def test_views_made_without_gradients_stay_so() -> None:
    leaf = torch.ones(4, requires_grad=True)
    with torch.no_grad():
        fixed = leaf[:3]
    given = (fixed, leaf[1:])
    made = copies_of(*given).values
    assert [(one.requires_grad, one.is_leaf) for one in made] == [(one.requires_grad, one.is_leaf) for one in given]


def test_tensors_made_of_other_tensors_are_refused() -> None:
    with pytest.raises(UncheckableError, match="tensors of the class TwoTensor"):
        copies_of(TwoTensor(torch.ones(2), torch.zeros(2)))


def test_nested_tensors_are_refused() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    with pytest.raises(UncheckableError, match="nested"):
        copies_of([nested])
