"""Times of a training step under ort_train, in units of eager's and of inductor's.

A step is zero_grad, forward with loss, backward, and AdamW in eager. Compilation and warm-up are not counted.
"""

from __future__ import annotations

import pytest
import torch

from bench.contestants import TrainingStep
from bench.results import Compare
from bench.workloads import WORKLOADS, Size, build

_ROUNDS = {"tiny": 6, "small": 24, "medium": 12}

_WARM_UP_STEPS = 3


@pytest.mark.parametrize("workload", WORKLOADS)
def test_training_step(workload: str, size: Size, backends: tuple[str, ...], compare: Compare) -> None:
    steps = {backend: TrainingStep(build(workload, size), backend) for backend in backends}
    losses = {backend: _warm_up(step) for backend, step in steps.items()}
    # The same seed gives the same dropout masks, so losses must agree. Inductor's random numbers differ.
    torch.testing.assert_close(losses["ort_train"], losses["eager"], rtol=1e-2, atol=1e-3)
    compare("training step", workload, steps, _ROUNDS[size])


def _warm_up(step: TrainingStep) -> torch.Tensor:
    """Compile, take a few steps, and give their losses."""
    torch.manual_seed(1)
    return torch.stack([step() for _ in range(_WARM_UP_STEPS)])
