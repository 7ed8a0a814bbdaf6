"""A look at the frames of a program for the caller of a compiled function leaves them as they were."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch import nn

import ort_dynamo  # noqa: F401 - the look is part of every compile of Dynamo's from then on


def test_a_model_that_a_function_deletes_is_freed_before_the_function_returns() -> None:
    model = nn.Linear(2, 2)
    torch.compile(model, backend="ort_train")(torch.ones(1, 2))
    gone = weakref.ref(model.weight)
    del model
    gc.collect()
    assert gone() is None


def test_variables_that_the_program_has_read_stay() -> None:
    kept = 3
    model = nn.Linear(2, 2)
    before: dict[str, Any] = locals()
    torch.compile(model, backend="ort_train")(torch.ones(1, 2))
    assert before["kept"] == kept
    assert locals()["kept"] == kept
