"""Tests of accumulations whose steps reach different weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from small_trainers import DESC, FORMS, PlainLoop, assert_same_weights, batches, make_trainer, weights
from torch import Tensor, nn

from ort_dynamo import amp, optim
from ort_dynamo.training.trainer import whole_step

TWO_STEPS: dict[str, Any] = {"batch": {"gradient_accumulation_steps": 2}}
LARGE, SMALL = 8, 3


class BySize(nn.Module):
    """A large batch goes through one layer, and a small one, such as the last of an epoch, through another."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Linear(4, 8)
        self.small = nn.Linear(4, 8)
        self.both = nn.Linear(8, 3)

    def forward(self, input1: Tensor) -> Tensor:
        layer = self.large if input1.shape[0] > 4 else self.small
        return self.both(torch.tanh(layer(input1)))


class Apart(nn.Module):
    """Its two layers have no weight in common, and their gradients overflow where the input says so."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Linear(4, 3)
        self.small = nn.Linear(4, 3)

    def forward(self, input1: Tensor, factor: Tensor) -> Tensor:
        layer = self.large if input1.shape[0] > 4 else self.small
        return layer(input1) * factor


def of_sizes(*sizes: int) -> list[tuple[Tensor, Tensor]]:
    return [batches(1, size, seed)[0] for seed, size in enumerate(sizes)]


@FORMS
@pytest.mark.parametrize(
    "config",
    [
        optim.SGDConfig(lr=0.1),
        optim.AdamConfig(lr=0.01, max_norm_clip=0.1),
        pytest.param(optim.LambConfig(lr=0.01, max_norm_clip=0.1), marks=pytest.mark.slow),
    ],
    ids=["sgd", "adam", "lamb"],
)
def test_a_weight_of_an_earlier_step_is_updated(config: Any, one_session: bool) -> None:
    torch.manual_seed(1)
    trainer = make_trainer(config, BySize(), one_session=one_session, **TWO_STEPS)
    plain = PlainLoop(trainer._torch_model, config, gathers=2)  # type: ignore[arg-type]
    for batch in of_sizes(LARGE, SMALL, SMALL, LARGE, LARGE, SMALL):
        assert trainer.train_step(*batch)[0].item() == pytest.approx(plain.step(*batch), rel=2e-5)
        assert_same_weights(trainer, plain.weights)
    assert trainer._running is not None
    assert trainer._running.in_one_session == one_session


@FORMS
def test_a_weight_that_no_step_reached_stays(one_session: bool) -> None:
    trainer = make_trainer(optim.AdamConfig(lr=0.01), BySize(), one_session=one_session, **TWO_STEPS)
    for batch in of_sizes(LARGE, SMALL):
        trainer.train_step(*batch)
    before = weights(trainer)
    for batch in of_sizes(LARGE, LARGE):
        trainer.train_step(*batch)
    moved = {name for name, one in weights(trainer).items() if not np.array_equal(one, before[name])}
    assert moved == {"large.weight", "large.bias", "both.weight", "both.bias"}


@FORMS
def test_an_overflow_in_a_weight_of_an_earlier_step_skips_the_update(one_session: bool) -> None:
    trainer = make_trainer(
        model=Apart(),
        desc={**DESC, "inputs": [("input1", ["batch", 4]), ("factor", []), ("label", ["batch"])]},
        one_session=one_session,
        mixed_precision={"enabled": True, "loss_scaler": amp.DynamicLossScaler(loss_scale=2.0**8)},
        **TWO_STEPS,
    )
    counts = []
    for (x, y), factor in zip(of_sizes(LARGE, SMALL, LARGE, SMALL), (float("inf"), 1.0, 1.0, 1.0), strict=True):
        trainer.train_step(x, torch.tensor(factor), y)
        counts.append(trainer._train_step_info.optimization_step)
    assert counts == [0, 0, 0, 1]
    assert all(np.isfinite(one).all() for one in weights(trainer).values())


def test_steps_of_many_branches_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_step, "_MOST_SETS", 1)
    config = optim.AdamConfig(lr=0.01)
    trainer = make_trainer(config, BySize(), one_session=True, **TWO_STEPS)
    plain = PlainLoop(trainer._torch_model, config, gathers=2)  # type: ignore[arg-type]
    data = of_sizes(LARGE, SMALL, SMALL, LARGE, LARGE, SMALL)
    with pytest.warns(UserWarning, match="reach more than 1 sets of weights"):
        losses = [trainer.train_step(*batch)[0].item() for batch in data]
    assert losses == pytest.approx([plain.step(*batch) for batch in data], rel=2e-5)
    assert_same_weights(trainer, plain.weights)
    assert trainer._running is not None
    assert not trainer._running.in_one_session


def test_an_accumulation_goes_on_where_its_updating_step_runs_apart() -> None:
    config = optim.SGDConfig(lr=0.1)
    trainer = make_trainer(config, BySize(), one_session=True, **TWO_STEPS)
    plain = PlainLoop(trainer._torch_model, config, gathers=2)  # type: ignore[arg-type]
    for batch in of_sizes(LARGE, SMALL):
        trainer.train_step(*batch)
        plain.step(*batch)
        assert trainer._running is not None
        trainer._running._one_session = False
    assert_same_weights(trainer, plain.weights)


@FORMS
@pytest.mark.parametrize("deferred", [True, False], ids=["deferred", "at once"])
def test_a_run_resumes_bit_for_bit_between_steps_of_different_weights(one_session: bool, deferred: bool) -> None:
    first, second = (
        make_trainer(optim.AdamConfig(lr=0.1), BySize(), one_session=one_session, **TWO_STEPS) for _ in range(2)
    )
    data = of_sizes(SMALL, LARGE, LARGE, SMALL, LARGE, LARGE)
    for batch in data[:3]:
        first.train_step(*batch)
    state = first.state_dict()
    assert state["gathered_gradients"].keys() == {"large.weight", "large.bias", "both.weight", "both.bias"}
    if not deferred:
        second.train_step(*data[3])
    second.load_state_dict(state)
    for batch in data[3:]:
        for trainer in (first, second):
            trainer.train_step(*batch)
        assert all(np.array_equal(one, weights(second)[name]) for name, one in weights(first).items())
