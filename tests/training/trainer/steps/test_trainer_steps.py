"""Section 2.5 of ORTTrainer's reference: train_step, its outputs, rates, batches and counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from small_trainers import DESC, FORMS, PlainLoop, assert_same_weights, batches, classify, losses, make_trainer, weights
from torch import Tensor, nn

from ort_dynamo import optim
from ort_dynamo.report.record import RECORDS
from ort_dynamo.testing import assert_close


def compiles() -> int:
    return len(RECORDS)


# -- outputs -----------------------------------------------------------------------------------------------------------


@FORMS
def test_steps_give_the_outputs_before_the_update_in_the_descriptions_order(one_session: bool) -> None:
    trainer = make_trainer(one_session=one_session)
    model = trainer._torch_model
    assert model is not None
    x, y = batches(1)[0]
    for step in (trainer.eval_step, trainer.train_step):
        loss, prediction = step(x, y)
        assert_close(loss, classify(model(x), y).detach(), "loss")
        assert_close(prediction, model(x).detach(), "prediction")
        assert loss.shape == ()
        assert not loss.requires_grad
        assert not prediction.requires_grad


def test_a_single_output_is_given_bare() -> None:
    trainer = make_trainer(desc={"inputs": DESC["inputs"], "outputs": DESC["outputs"][:1]})
    x, y = batches(1)[0]
    assert isinstance(trainer.eval_step(x, y), Tensor)
    assert isinstance(trainer.train_step(x, y), Tensor)


def test_fetches_choose_outputs_and_their_order() -> None:
    trainer = make_trainer(optim.SGDConfig(lr=0.0))
    x, y = batches(1)[0]
    loss, prediction = trainer.train_step(x, y)
    info = trainer._train_step_info
    info.fetches = ["predictions", "loss"]
    for step in (trainer.train_step, trainer.eval_step):
        found = step(x, y)
        assert torch.equal(found[0], prediction)
        assert torch.equal(found[1], loss)
    info.fetches = ["predictions"]
    assert torch.equal(trainer.eval_step(x, y), prediction)
    info.fetches = ["predictions", "prediction"]
    for step in (trainer.train_step, trainer.eval_step):
        with pytest.raises(RuntimeError, match="The specified fetches list contains invalid output names"):
            step(x, y)
    assert info.step == 2
    info.fetches = []
    assert len(trainer.train_step(x, y)) == 2


# -- learning rates ----------------------------------------------------------------------------------------------------

RAMP = [0.0, 0.2, 0.4, 0.6, 0.8]
RATES = {
    "constant": (optim.ConstantWarmupLRScheduler, [*RAMP, 1.0, 1.0, 1.0, 1.0, 1.0]),
    "linear": (optim.LinearWarmupLRScheduler, [*RAMP, 1.0, 0.8, 0.6, 0.4, 0.2]),
    "cosine": (optim.CosineWarmupLRScheduler, [*RAMP, 1.0, 0.9045, 0.6545, 0.3455, 0.0955]),
    "poly": (optim.PolyWarmupLRScheduler, [*RAMP, 1.0, 0.8, 0.6, 0.4, 0.2]),
}


@pytest.mark.parametrize("name", RATES)
def test_a_scheduler_is_asked_for_the_rate_of_each_step(name: str) -> None:
    make, expected = RATES[name]
    scheduler = make(total_steps=10, warmup=0.5)
    trainer = make_trainer(optim.SGDConfig(lr=1.0), lr_scheduler=scheduler)
    found, moved = [], []
    for batch in batches(10):
        before = None if trainer._running is None else weights(trainer)["fc2.bias"]
        _, prediction = trainer.train_step(*batch)
        found += scheduler.get_last_lr()
        if before is not None:
            mean = (torch.softmax(prediction, 1) - nn.functional.one_hot(batch[1], 3)).mean(0)
            change = before - weights(trainer)["fc2.bias"]
            moved.append(float(torch.from_numpy(change) @ mean / (mean @ mean)))
    np.testing.assert_allclose(found, expected, atol=1e-4)
    np.testing.assert_allclose(moved, expected[1:], atol=1e-4)


def test_the_first_rate_of_a_warm_up_is_nought() -> None:
    trainer = make_trainer(optim.SGDConfig(lr=1.0), lr_scheduler=optim.LinearWarmupLRScheduler(10, 0.5))
    batch = batches(1)[0]
    trainer.eval_step(*batch)
    before = weights(trainer)
    trainer.train_step(*batch)
    assert all(np.array_equal(one, before[name]) for name, one in weights(trainer).items())


def test_a_scheduler_goes_by_updates_not_by_steps() -> None:
    class Seen(optim.LinearWarmupLRScheduler):
        """Records its arguments and results."""

        def get_lr(self, train_step_info: Any) -> list[float]:
            told.append((train_step_info.step, train_step_info.optimization_step))
            return super().get_lr(train_step_info)

    told: list[tuple[int, int]] = []
    trainer = make_trainer(lr_scheduler=Seen(10, 0.5), batch={"gradient_accumulation_steps": 2})
    for batch in batches(4):
        trainer.train_step(*batch)
    trainer.eval_step(*batches(1)[0])
    assert told == [(1, 0), (2, 0), (3, 1), (4, 1)]


# -- gathering ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "one_session"),
    [(1, True), (3, True), (7, False), (12, True)],
)
def test_an_update_takes_the_mean_of_the_gradients_of_its_steps(steps: int, one_session: bool) -> None:
    config = optim.SGDConfig(lr=0.5)
    trainer = make_trainer(config, one_session=one_session, batch={"gradient_accumulation_steps": steps})
    plain = PlainLoop(trainer._torch_model, config, gathers=steps)  # type: ignore[arg-type]
    counts = []
    for batch in batches(13):
        assert trainer.train_step(*batch)[0].item() == pytest.approx(plain.step(*batch), rel=2e-5)
        counts.append(trainer._train_step_info.optimization_step)
    assert_same_weights(trainer, plain.weights)
    assert counts == [step // steps for step in range(1, 14)]
    assert trainer._train_step_info.step == 13


# -- sizes -------------------------------------------------------------------------------------------------------------


@FORMS
def test_a_third_batch_size_compiles_nothing_new(one_session: bool) -> None:
    trainer = make_trainer(optim.SGDConfig(lr=0.1), one_session=one_session)
    plain = PlainLoop(trainer._torch_model, optim.SGDConfig(lr=0.1))  # type: ignore[arg-type]
    counts = []
    for size in (6, 5, 4, 9):
        batch = batches(1, size, seed=size)[0]
        assert trainer.train_step(*batch)[0].item() == pytest.approx(plain.step(*batch), rel=2e-5)
        assert trainer.eval_step(*batch)[1].shape == (size, 3)
        counts.append(compiles())
    assert counts[1] == counts[2] == counts[3]
    assert_same_weights(trainer, plain.weights)


def test_sizes_of_one_name_must_be_equal() -> None:
    trainer = make_trainer()
    x, y = batches(1)[0]
    for step in (trainer.train_step, trainer.eval_step):
        with pytest.raises(AssertionError) as raised:
            step(x, y[:-1])
        assert str(raised.value) == "Mismatch in dynamic shape batch"
    assert trainer._train_step_info.step == 0


def test_a_batch_of_one_is_a_batch() -> None:
    trainer = make_trainer(optim.SGDConfig(lr=0.1))
    plain = PlainLoop(trainer._torch_model, optim.SGDConfig(lr=0.1))  # type: ignore[arg-type]
    for size in (1, 6, 1):
        batch = batches(1, size)[0]
        assert trainer.train_step(*batch)[0].item() == pytest.approx(plain.step(*batch), rel=2e-5)
    assert_same_weights(trainer, plain.weights)


# -- the rest ----------------------------------------------------------------------------------------------------------


def test_counts_go_on_with_each_step() -> None:
    trainer = make_trainer()
    info = trainer._train_step_info
    assert (info.step, info.optimization_step, info.all_finite) == (0, 0, True)
    losses(trainer, batches(3))
    trainer.eval_step(*batches(1)[0])
    assert (info.step, info.optimization_step, info.all_finite) == (3, 3, True)
    assert info.optimizer_config is trainer.optim_config


def test_input_tensors_are_left_as_they_are() -> None:
    trainer = make_trainer()
    x, y = batches(1)[0]
    x.requires_grad_()
    before = x.detach().clone()
    trainer.train_step(x, y)
    assert torch.equal(x, before)
    assert x.grad is None


def test_results_stay_when_the_next_step_runs() -> None:
    trainer = make_trainer(optim.SGDConfig(lr=1.0))
    data = batches(4)
    kept = [trainer.train_step(*batch) for batch in data]
    copies = [[one.clone() for one in trainer_outputs] for trainer_outputs in kept]
    losses(trainer, data)
    for outputs, before in zip(kept, copies, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(outputs, before, strict=True))


def test_a_changed_learning_rate_of_the_configuration_counts() -> None:
    config = optim.SGDConfig(lr=0.1)
    trainer = make_trainer(config)
    batch = batches(1)[0]
    trainer.train_step(*batch)
    before = weights(trainer)
    config.lr = 0.0
    trainer.train_step(*batch)
    assert all(np.array_equal(one, before[name]) for name, one in weights(trainer).items())


def test_a_failed_step_leaves_counts_and_weights() -> None:
    trainer = make_trainer()
    x, y = batches(1)[0]
    trainer.train_step(x, y)
    before = weights(trainer)
    with pytest.raises(Exception):  # noqa: B017  # torch's own, of shapes that do not fit
        trainer.train_step(torch.randn(6, 5), y)
    assert all(np.array_equal(one, before[name]) for name, one in weights(trainer).items())
    assert (trainer._train_step_info.step, trainer._train_step_info.optimization_step) == (1, 1)
    trainer.train_step(x, y)
