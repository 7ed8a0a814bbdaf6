"""Results that choose among equal elements in another way are equal."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ort_dynamo.verification.equal_choice import is_same_choice

aten = torch.ops.aten
X = torch.tensor([[3, 1, 3], [2, 2, 5]])


@pytest.mark.parametrize(
    ("operator", "args", "found"),
    [
        (aten.max.dim, (X, 1), (torch.tensor([3, 5]), torch.tensor([2, 2]))),
        (aten.max.dim, (X, 1, True), (torch.tensor([[3], [5]]), torch.tensor([[2], [2]]))),
        (aten.argmax.default, (X[:1],), (torch.tensor(2),)),
        (aten.sort.default, (X,), (X.sort()[0], torch.tensor([[1, 2, 0], [1, 0, 2]]))),
        (aten.topk.default, (X, 2), (X.topk(2)[0], torch.tensor([[2, 0], [2, 1]]))),
    ],
)
def test_equal_elements_are_the_same_choice(operator: Any, args: Any, found: Any) -> None:
    results = operator(*args)
    expected = results if isinstance(results, tuple) else (results,)
    assert is_same_choice(operator, args, {}, found, expected)
    wrong = (*found[:-1], torch.ones_like(found[-1]))
    assert not is_same_choice(operator, args, {}, wrong, expected)
    outside = (*found[:-1], found[-1] + 9)
    assert not is_same_choice(operator, args, {}, outside, expected)


def test_other_operators_choose_nothing() -> None:
    assert not is_same_choice(aten.add.Tensor, (X, X), {}, (X,), (X,))
