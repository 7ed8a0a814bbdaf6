"""How long is it from torch.compile to the end of the first training step?

Every cache is cold: torch._dynamo.reset() empties those in memory, and inductor's on disk are switched off. What a
process pays once, whatever it compiles (imports, inductor's precompiled header), is paid before.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters

from bench.contestants import TrainingStep
from bench.results import Compare
from bench.workloads import WORKLOADS, Size, Workload, build

_ROUNDS = {"tiny": 1, "small": 3, "medium": 3}


@pytest.mark.parametrize("workload", WORKLOADS)
def test_first_step(workload: str, size: Size, backends: tuple[str, ...], compare: Compare) -> None:
    contestants = {backend: partial(_first_step, build(workload, size), backend) for backend in backends}
    with torch.compiler.config.patch(force_disable_caches=True):
        for backend in backends:
            _first_step(build("mlp", "tiny"), backend)
        counters.clear()
        compare("first step", workload, contestants, _ROUNDS[size])


def _first_step(workload: Workload, backend: str) -> None:
    torch._dynamo.reset()
    TrainingStep(workload, backend)()
