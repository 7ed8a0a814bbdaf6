"""A look at the frames of a program for the caller of a compiled function leaves them as they were."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import utils
from torch.fx import GraphModule

# The look is part of every compile of Dynamo's from then on.
from ort_dynamo.torch_internals.tracing.frames import Frame, watch_attempts


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


def test_a_backend_may_call_compiled_code_while_it_compiles() -> None:
    def nesting(gm: GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        inner = torch.compile(lambda x: x + 1, backend="ort_train")
        assert inner(torch.ones(2)).tolist() == [2.0, 2.0]
        return gm

    outer = torch.compile(lambda x: x * 3, backend=nesting)
    assert outer(torch.ones(3)).tolist() == [3.0, 3.0, 3.0]
    assert outer(torch.ones(2, 2)).tolist() == [[3.0, 3.0], [3.0, 3.0]]


def test_an_attempt_around_another_keeps_its_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Frame] = []

    def nesting(gm: GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        torch.compile(lambda x: x + 1, backend="ort_train")(torch.ones(2))
        return gm

    monkeypatch.setattr(utils, "log_compilation_event", vars(utils)["log_compilation_event"])  # restored after the test
    watch_attempts(seen.append)
    model = torch.compile(nn.Flatten(), backend=nesting)
    model(torch.ones(2, 2, 2))
    assert [frame.caller.module for frame in seen if frame.caller] == ["Flatten"]
