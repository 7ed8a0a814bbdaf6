"""The benchmarks' models: each builds, and can be trained."""

from __future__ import annotations

import pytest
import torch

workloads = pytest.importorskip("bench.workloads", reason="bench is importable under `python -m pytest` only")


@pytest.mark.parametrize("name", workloads.WORKLOADS)
def test_the_loss_is_a_finite_scalar_that_every_parameter_gets_a_gradient_from(name: str) -> None:
    workload = workloads.build(name, "tiny")
    loss = workload.module(*workload.batch)
    assert loss.shape == ()
    assert torch.isfinite(loss)
    loss.backward()
    without = [name for name, parameter in workload.module.named_parameters() if parameter.grad is None]
    assert not without


@pytest.mark.parametrize("name", workloads.WORKLOADS)
def test_equal_seeds_build_equal_workloads(name: str) -> None:
    first, second = workloads.build(name, "tiny", seed=3), workloads.build(name, "tiny", seed=3)
    for one, other in zip(first.module.parameters(), second.module.parameters(), strict=True):
        assert torch.equal(one, other)
    for one, other in zip(first.batch, second.batch, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["mlp", "bert", "gpt2"])
def test_dropout_is_on(name: str) -> None:
    workload = workloads.build(name, "tiny")
    assert workload.module(*workload.batch) != workload.module(*workload.batch)
