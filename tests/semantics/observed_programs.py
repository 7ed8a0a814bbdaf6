"""Programs that run twice, with their functions left alone and compiled, and return everything they can observe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from ort_dynamo.testing import assert_close

Compile = Callable[..., Any]
Program = Callable[[Compile], Any]


def same_as_eager(program: Program, **kwargs: Any) -> None:
    torch.manual_seed(0)
    expected = tree_leaves(program(lambda function, **_: function))
    torch.manual_seed(0)
    found = tree_leaves(
        program(lambda function, **more: torch.compile(function, backend="ort_train", **kwargs, **more))
    )
    assert len(found) == len(expected)
    for index, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        assert type(mine) is type(theirs), f"value {index} is {type(mine)}, eager gives {type(theirs)}"
        assert_close(mine, theirs, f"value {index}")


def facts(*tensors: Any) -> list[Any]:
    """Give the tensors, and for each its requires_grad and the earlier ones that share its memory."""
    seen: list[Any] = []
    for index, tensor in enumerate(tensors):
        seen.append(tensor.detach().clone() if isinstance(tensor, torch.Tensor) else tensor)
        if isinstance(tensor, torch.Tensor):
            storage = tensor.untyped_storage().data_ptr()
            before = [t for t in tensors[:index] if isinstance(t, torch.Tensor)]
            shares = [i for i, t in enumerate(before) if storage and t.untyped_storage().data_ptr() == storage]
            same = [i for i, t in enumerate(before) if t is tensor]
            seen += [str(shares), str(same), tensor.requires_grad, tensor.is_leaf, str(tensor.stride())]
    return seen


PROGRAMS: dict[str, list[Program]] = {}


def program(kind: str) -> Callable[[Program], Program]:
    def add(function: Program) -> Program:
        PROGRAMS.setdefault(kind, []).append(function)
        return function

    return add


def kinds(kind: str) -> Any:
    return pytest.mark.parametrize("one", PROGRAMS[kind], ids=lambda p: p.__name__)
