"""Every test starts with nothing compiled and nothing counted, and may not lower by what no key holds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo import guards
from torch._dynamo.utils import counters
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ort_dynamo.torch_internals import answers

if "PYTEST_XDIST_WORKER" in os.environ:
    # The workers share the cores; threads that spin in each of them would wait for one another.
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True, scope="session")
def unmeasured_guards() -> None:
    """Keep Dynamo from timing its guards after each compile: it flushes the CPU's caches first, a quarter of a test."""
    if hasattr(guards, "profile_guard_manager"):
        guards.profile_guard_manager = lambda *_: 0.0


@pytest.fixture(autouse=True)
def complete_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make it an error to lower a graph by a fact about its sizes that its nodes did not record for the key."""
    evaluate = ShapeEnv.evaluate_expr

    def watched(self: ShapeEnv, expr: Any, *args: Any, **kwargs: Any) -> Any:
        result = evaluate(self, expr, *args, **kwargs)
        if answers.is_watched() and expr.free_symbols:
            raise AssertionError(f"a lowering asked torch itself, not torch_internals/symbols.py, for {expr}")
        return result

    monkeypatch.setattr(answers, "strict", True)
    monkeypatch.setattr(ShapeEnv, "evaluate_expr", watched)
