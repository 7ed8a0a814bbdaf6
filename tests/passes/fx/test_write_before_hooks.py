"""Buffers that a forward writes are written before a hook gets its saved tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from ort_dynamo.fx_testing import assert_fx_rewrites, assert_fx_untouched
from ort_dynamo.passes.fx.write_before_hooks import WriteBeforeHooks, write_before_hooks

BEFORE = """
x: f32[2, 3]
calls: f32[]
add = aten.add.Tensor(calls, 1)  # f32[]
sin = aten.sin.default(x)  # f32[2, 3]
return [add, sin, x]
"""


def test_the_call_comes_last_and_gets_the_saved_tensors() -> None:
    assert_fx_rewrites(
        WriteBeforeHooks({0: 1}, slice(2, None)),
        BEFORE,
        """
        x: f32[2, 3]
        calls: f32[]
        add = aten.add.Tensor(calls, 1)  # f32[]
        sin = aten.sin.default(x)  # f32[2, 3]
        write_before_hooks = write_before_hooks([calls], [add], [x])
        return [add, sin, x]
        """,
    )


def test_a_forward_that_writes_no_input_stays() -> None:
    assert_fx_untouched(WriteBeforeHooks({}, slice(2, None)), BEFORE)


def ignored(tensor: torch.Tensor) -> Any:
    return tensor


@pytest.mark.parametrize("hooked", [False, True])
def test_an_input_is_written_only_if_hooks_are_set(hooked: bool) -> None:
    given, result = torch.zeros(3), torch.ones(3)
    if hooked:
        with saved_tensors_hooks(ignored, ignored):
            write_before_hooks([given], [result], [])
    else:
        write_before_hooks([given], [result], [])
    assert given.tolist() == [float(hooked)] * 3


def test_an_input_that_is_saved_is_not_written() -> None:
    given, other = torch.zeros(3), torch.zeros(3)
    with saved_tensors_hooks(ignored, ignored):
        write_before_hooks([given, other], [torch.ones(3)] * 2, [given[1:]])
    assert (given.tolist(), other.tolist()) == ([0.0] * 3, [1.0] * 3)
