"""The time from torch.compile to the end of the first training step.

All caches are cold: torch._dynamo.reset() empties those in memory, and inductor's on disk are off. One-time costs of a
process (imports, inductor's precompiled header) are not counted.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters

from bench.contestants import SUBJECT, TrainingStep
from bench.results import Compare
from bench.workloads import WORKLOADS, Size, Workload, build

_ROUNDS = {"tiny": 1, "small": 3, "medium": 3}

_TINY = ("mlp", "gpt2")  # inductor's compiler takes as long for the smallest model as for a large one


@pytest.fixture(scope="module")
def _paid_once(backends: tuple[str, ...]) -> None:
    """Each backend has compiled something in this process."""
    for backend in backends:
        _first_step(build("mlp", "tiny"), backend)


@pytest.mark.usefixtures("_paid_once")
@pytest.mark.parametrize("workload", WORKLOADS)
def test_first_step(workload: str, size: Size, backends: tuple[str, ...], compare: Compare) -> None:
    if size == "tiny" and workload not in _TINY:
        pytest.skip(f"of the tiny models, only {' and '.join(_TINY)}")
    contestants = {backend: partial(_first_step, build(workload, size), backend) for backend in backends}
    with torch.compiler.config.patch(force_disable_caches=True):
        compare("first step", workload, contestants, _ROUNDS[size])


def _first_step(workload: Workload, backend: str) -> None:
    torch._dynamo.reset()
    if backend == SUBJECT:
        counters.clear()  # the report is of one compilation, not of all rounds
    TrainingStep(workload, backend)()
