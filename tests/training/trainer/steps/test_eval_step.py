"""Section 2.5 of ORTTrainer's reference: eval_step, beside steps that train."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from small_trainers import FORMS, PlainLoop, assert_same_weights, batches, make_trainer, weights
from torch import Tensor, nn

from ort_dynamo import optim
from ort_dynamo.testing import assert_close


class Normed(nn.Module):
    """With a batch normalization and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(4, 8)
        self.bn = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)
        self.fc2 = nn.Linear(8, 3)

    def forward(self, input1: Tensor) -> Tensor:
        return self.fc2(self.drop(self.bn(self.fc1(input1))))


def test_an_evaluation_changes_nothing_and_drops_nothing() -> None:
    class Seen(optim.LinearWarmupLRScheduler):
        """Records its arguments."""

        def get_lr(self, train_step_info: Any) -> list[float]:
            told.append(train_step_info)
            return super().get_lr(train_step_info)

    told: list[Any] = []
    model = Normed()
    trainer = make_trainer(model=model, lr_scheduler=Seen(10, 0.5))
    x, y = batches(1)[0]
    state = torch.get_rng_state()
    first = trainer.eval_step(x, y)
    assert torch.equal(torch.get_rng_state(), state)
    model.eval()
    assert_close(first[1], model(x).detach(), "predictions")
    before = trainer.state_dict()
    assert all(torch.equal(a, b) for a, b in zip(first, trainer.eval_step(x, y), strict=True))
    after = trainer.state_dict()
    for name, one in after["model"]["full_precision"].items():
        assert np.array_equal(one, before["model"]["full_precision"][name])
    assert before["train_step_info"] == after["train_step_info"] == {"optimization_step": 0, "step": 0}
    assert told == []


def test_a_trained_model_is_evaluated_as_it_is_then() -> None:
    trainer = make_trainer(model=Normed())
    x, y = batches(1)[0]
    trainer.eval_step(x, y)
    torch.manual_seed(3)
    drawn = [trainer.train_step(x, y)[1] for _ in range(2)]
    assert not torch.equal(*drawn)
    plain = Normed().eval()
    plain.load_state_dict(trainer.state_dict(pytorch_format=True))
    assert_close(trainer.eval_step(x, y)[1], plain(x).detach(), "predictions")
    found = weights(trainer)
    assert found["bn.num_batches_tracked"] == 2
    assert (found["bn.running_mean"] != 0).all()


@FORMS
def test_dropout_is_torchs_for_the_same_seed(one_session: bool) -> None:
    model = Normed()
    trainer = make_trainer(model=model, one_session=one_session)
    x, y = batches(1)[0]
    torch.manual_seed(11)
    _, found = trainer.train_step(x, y)
    torch.manual_seed(11)
    assert_close(found, model.train()(x).detach(), "predictions")


def test_gathered_gradients_outlive_an_evaluation() -> None:
    config = optim.SGDConfig(lr=0.5)
    trainer = make_trainer(config, batch={"gradient_accumulation_steps": 2})
    plain = PlainLoop(trainer._torch_model, config, gathers=2)  # type: ignore[arg-type]
    for batch in batches(4):
        trainer.train_step(*batch)
        trainer.eval_step(*batch)
        plain.step(*batch)
    assert_same_weights(trainer, plain.weights)


@FORMS
@pytest.mark.parametrize("evaluates", [True, False], ids=["first step evaluates", "first step trains"])
def test_steps_in_inference_mode_are_like_others(one_session: bool, evaluates: bool) -> None:
    trainer, expected = (make_trainer(one_session=one_session) for _ in range(2))
    given = batches(3)
    with torch.inference_mode():
        inside = [one.clone() for one in given[0]]
        if evaluates:
            loss, _ = trainer.eval_step(*inside)
            assert not loss.requires_grad
        trainer.train_step(*inside)
        trainer.load_state_dict(trainer.state_dict())
    for batch in given[1:]:
        trainer.train_step(*batch)
    for batch in given:
        expected.train_step(*batch)
    assert_same_weights(trainer, weights(expected))
