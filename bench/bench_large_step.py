"""Times of steps of one to three seconds, in units of eager's, of inductor's, and of the step's matmuls alone.

A step is forward with loss, and backward. The optimizer is left out: its time grows with the weights, not with the
batch. The matmuls are those of eager's step, run by torch (bench/products.py). They are a lower bound of a step.
"""

from __future__ import annotations

import pytest
import torch

from bench.contestants import SUBJECT, TrainingStep
from bench.products import products_of
from bench.results import PRODUCTS, Compare
from bench.workloads import LARGE, Size, build

_ROUNDS = {"tiny": 2, "small": 8, "medium": 16}

_WARM_UP_STEPS = 2


@pytest.mark.parametrize("workload", LARGE)
def test_large_step(workload: str, size: Size, backends: tuple[str, ...], compare: Compare) -> None:
    """`--bench-size tiny` has the tiny models, every other size the large ones."""
    scale: Size = "tiny" if size == "tiny" else "large"
    steps = {backend: TrainingStep(build(workload, scale), backend, update=False) for backend in backends}
    losses = {backend: _warm_up(step) for backend, step in steps.items()}
    torch.testing.assert_close(losses[SUBJECT], losses["eager"], rtol=1e-2, atol=1e-3)
    products = products_of(steps["eager"])
    compare("step of seconds", workload, {PRODUCTS: products, **steps}, _ROUNDS[size])


def _warm_up(step: TrainingStep) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.stack([step() for _ in range(_WARM_UP_STEPS)])
