"""Small models that tests of ORTModule share, and the comparison with eager."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from ort_dynamo import ORTModule
from ort_dynamo.report.record import RECORDS
from ort_dynamo.testing import assert_close

__all__ = ["Dense", "Normed", "assert_steps_like_eager", "compiles", "pair"]


class Dense(nn.Module):
    """Two layers."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 16)
        self.fc2 = nn.Linear(16, 4)

    def forward(self, input1: Tensor) -> Tensor:
        return self.fc2(torch.relu(self.fc1(input1)))


class Normed(nn.Module):
    """With buffers, dropout and results in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.5)
        self.fc2 = nn.Linear(16, 4)

    def forward(self, x: Tensor, y: Tensor | None = None, *, scale: float = 1.0) -> dict[str, Any]:
        found = self.fc2(self.drop(torch.relu(self.norm(self.fc1(x))))) * scale
        return {"out": found if y is None else found + y, "none": None}


def pair(model: nn.Module) -> tuple[ORTModule, nn.Module]:
    """An ORTModule of a copy of a model, and the model."""
    return ORTModule(copy.deepcopy(model)), model


def compiles() -> int:
    """Count the graphs compiled so far."""
    return len(RECORDS)


def assert_steps_like_eager(ort_model: nn.Module, model: nn.Module, *inputs: Any, seed: int = 0, **kwargs: Any) -> None:
    """Compare a step's results and gradients of parameters; forgets the gradients."""
    found = []
    for one in (ort_model, model):
        torch.manual_seed(seed)
        outputs = one(*inputs, **kwargs)
        tensors = [o for o in torch.utils._pytree.tree_leaves(outputs) if isinstance(o, Tensor) and o.requires_grad]
        sum(tensor.sum() for tensor in tensors).backward()  # type: ignore[union-attr]
        found.append((outputs, {name: p.grad for name, p in one.named_parameters()}))
        one.zero_grad()
    (mine, my_gradients), (theirs, their_gradients) = found
    assert type(mine) is type(theirs)
    leaves = [torch.utils._pytree.tree_leaves(one) for one in (mine, theirs)]
    for index, (actual, expected) in enumerate(zip(*leaves, strict=True)):
        assert_close(actual, expected, f"output {index}")
    assert my_gradients.keys() == their_gradients.keys()
    for name, gradient in their_gradients.items():
        assert_close(my_gradients[name], gradient, f"gradient of {name}", strides=False)
