"""A verification and an explanation leave no compiled graph behind, although Dynamo keeps their backends."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import Any

import pytest
import torch
from torch.fx import GraphModule
from twelve_layers import TwelveLayers, batch

import ort_dynamo
from ort_dynamo.cache.open_island import CACHE
from ort_dynamo.compilation.events import GraphCompilation
from ort_dynamo.runtime.compiled_graph import CompiledGraph


def alive() -> dict[str, int]:
    gc.collect()
    kinds = (GraphCompilation, CompiledGraph, GraphModule)
    return {kind.__name__: sum(issubclass(type(one), kind) for one in gc.get_objects()) for kind in kinds}


@pytest.mark.parametrize("call", [ort_dynamo.verify, ort_dynamo.explain])
def test_neither_graphs_nor_sessions_stay(call: Callable[..., Any]) -> None:
    model, given = TwelveLayers(), batch()
    call(model, *given)
    CACHE.clear()
    before = alive()
    for _ in range(3):
        call(model, *given)
    CACHE.clear()
    assert all(count <= before[kind] for kind, count in alive().items())  # some of other tests may be freed


@pytest.mark.parametrize("call", [ort_dynamo.verify, ort_dynamo.explain])
def test_a_call_leaves_few_objects(call: Callable[..., Any]) -> None:
    """A leak is in each call; one call of three may differ, as after some other tests."""
    model, given = TwelveLayers(), batch()
    for _ in range(2):
        call(model, *given)
    counts = [count_objects()]
    for _ in range(3):
        call(model, *given)
        counts.append(count_objects())
    assert median(after - before for before, after in pairwise(counts)) < 4_000


def count_objects() -> int:
    gc.collect()
    return len(gc.get_objects())


def test_the_option_lets_go_of_graphs_after_the_last_checked_call() -> None:
    model, given = TwelveLayers(), batch()
    compiled = torch.compile(model, backend="ort_train", options={"verify": 2})
    before = alive()["GraphCompilation"]
    compiled(*given)
    assert alive()["GraphCompilation"] == before + 2
    for _ in range(2):
        compiled(*given).backward()
    assert alive()["GraphCompilation"] == before
