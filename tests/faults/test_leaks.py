"""A short form of leaks.py: steps, compiles and wraps keep no object, tensor or session of ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from leaks import Sample, compiles, excess, grown_types, measure, steps, wraps


def test_steps_keep_nothing() -> None:
    *_, before, last = measure(steps("ort_train"), 90, points=3)
    assert last.tensors == before.tensors
    assert last.sessions == before.sessions
    assert last.objects - before.objects < 30  # less than one each


@pytest.mark.parametrize("work", [compiles, wraps], ids=lambda one: one.__name__)
def test_compiles_keep_nothing_of_ours(work: Callable[[str], Iterator[None]]) -> None:
    samples = measure(work("ort_train"), 8, points=2)
    middle, end = samples
    assert (end.tensors, end.sessions) == (middle.tensors, middle.sessions)
    kept = {name for name in grown_types(samples) if name.startswith(("ort_dynamo.", "onnx", "sympy", "torch.fx."))}
    assert kept <= {"ort_dynamo.torch_internals.tracing.callers.Caller"}  # of the last 1,024 compiles


def test_growth_is_seen() -> None:
    flat, grown = Sample(100, 1000, 10, 2), Sample(100, 1000, 11, 2)
    assert excess([flat, grown])["tensors"] == pytest.approx(0.1)
    assert excess([flat, grown], [flat, grown])["tensors"] == 0
    kept: list[torch.Tensor] = []

    def leaky() -> Iterator[None]:
        while True:
            kept.append(torch.ones(1))
            yield

    assert excess(measure(leaky(), 8, points=2))["tensors"] > 0
