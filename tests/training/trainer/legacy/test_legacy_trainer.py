"""The first ORTTrainer, that of onnxruntime.capi.ort_trainer: its steps and states, and today's beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from legacy_trainers import assert_same, batch, cross_entropy, legacy, net, today, weights
from torch import Tensor

from ort_dynamo import amp, optim
from ort_dynamo.testing import assert_close
from ort_dynamo.training.ort_trainer import LossScaler, load_checkpoint, save_checkpoint

# -- the two trainers --------------------------------------------------------------------------------------------------


def test_both_trainers_have_the_same_losses_and_weights_by_adam_with_attributes_of_each_weight() -> None:
    def attributes(name: str) -> dict[str, float | int]:
        decay = 0.0 if name.endswith("bias") else 0.01
        return {"alpha": 0.8, "beta": 0.99, "lambda": decay, "epsilon": 1e-6, "do_bias_correction": 1}

    own = legacy("AdamOptimizer", attributes)
    shared = {"alpha": 0.8, "beta": 0.99, "epsilon": 1e-6}
    group = {"params": ["fc1.weight", "fc2.weight"], "lambda_coef": 0.01}
    config = optim.AdamConfig([group], lr=0.01, **shared)
    new = today(config)
    for step in range(10):
        x, label = batch(step)
        assert torch.equal(own.train_step(x, label, 0.01)[0], new.train_step(x, label)[0]), step
    assert_same(own, new)


def test_both_trainers_agree_on_lamb_that_gathers_gradients_under_a_schedule() -> None:
    def attributes(name: str) -> dict[str, float | int]:
        return {"alpha": 0.9, "beta": 0.999, "lambda": 0.0, "epsilon": 1e-6, "do_bias_correction": 0}

    schedule = optim.LinearWarmupLRScheduler(total_steps=4, warmup=0.5)
    rates = [0.0, 0.05, 0.1, 0.05]
    own = legacy("LambOptimizer", attributes, gradient_accumulation_steps=3, get_lr_this_step=rates.__getitem__)
    new = today(optim.LambConfig(lr=0.1), batch={"gradient_accumulation_steps": 3}, lr_scheduler=schedule)
    for step in range(10):
        x, label = batch(step)
        assert torch.equal(own.train_step(x, label)[0], new.train_step(x, label)[0]), step
    assert (own.current_step, own.global_step_) == (10, 3)
    assert_same(own, new)


def test_both_trainers_agree_in_mixed_precision_with_their_loss_scalers() -> None:
    scaler = LossScaler("loss_scale", True, loss_scale=2.0**24, up_scale_window=2, max_loss_scale=2.0**30)
    own = legacy("AdamOptimizer", use_mixed_precision=True, loss_scaler=scaler)
    scaled = amp.DynamicLossScaler(loss_scale=2.0**24, up_scale_window=2, max_loss_scale=2.0**30)
    new = today(optim.AdamConfig(lr=0.01), mixed_precision={"enabled": True, "loss_scaler": scaled})
    scales = []
    for step in range(10):
        x, label = batch(step)
        outputs = own.train_step(x, label, torch.tensor([0.01]))
        assert len(outputs) == 2  # the scaler is told whether gradients were finite, not the program
        assert torch.equal(outputs[0], new.train_step(x, label)[0]), step
        scales.append(scaler.loss_scale_)
        assert scales[-1] == scaled.loss_scale
    assert min(scales) < scales[0] or max(scales) > scales[0]
    assert own.global_step_ == new._train_step_info.optimization_step < 10
    for name, value in new.state_dict(pytorch_format=True).items():  # 0.01 came as float32
        assert_close(own.state_dict()[name], value, name)


# -- steps -------------------------------------------------------------------------------------------------------------


def test_a_step_takes_its_learning_rate_in_each_documented_way() -> None:
    ways: list[Any] = [
        lambda trainer, x, label: trainer.train_step(x, label, 0.5),
        lambda trainer, x, label: trainer.train_step(x, label, torch.tensor([0.5])),
        lambda trainer, x, label: trainer.train_step([x, label, torch.tensor([0.5])]),
        lambda trainer, x, label: trainer.train_step(x, label, Learning_Rate=torch.tensor([0.5])),
        lambda trainer, x, label: trainer.train_step(Learning_Rate=0.5, label=label, x=x),
        lambda trainer, x, label: trainer(x, label, torch.tensor(0.5)),
    ]
    trainer = legacy()
    x, label = batch(0)
    start = {name: one.detach() for name, one in net().state_dict().items()}
    expected = net()
    cross_entropy(expected(x), label).backward()
    with torch.no_grad():
        for parameter in expected.parameters():
            parameter -= 0.5 * parameter.grad
    for way in ways:
        trainer.load_state_dict(start)
        loss, prediction = way(trainer, x, label)
        assert (loss.shape, prediction.shape) == ((), (5, 3))
        for name, value in expected.state_dict().items():
            assert_close(trainer.state_dict()[name], value, name)


def test_the_functor_of_the_learning_rate_counts_updates_from_global_step_on() -> None:
    asked: list[int] = []

    def rate(step: int) -> float:
        asked.append(step)
        return 0.1

    trainer = legacy(global_step=7, gradient_accumulation_steps=2, get_lr_this_step=rate)
    for step in range(5):
        trainer.train_step(*batch(step))
    assert asked == [7, 7, 8, 8, 9]
    assert trainer.global_step_ == 9


def test_fetches_choose_the_results_of_a_step_and_the_label_is_optional_without_the_loss() -> None:
    trainer = legacy(model=net(drop=0.5))
    x, label = batch(0)
    trainer.eval()
    before = net()(x).detach()
    assert_close(trainer.eval_step(x, fetches=["prediction"]), before, "prediction")  # the first step of all
    with pytest.warns(UserWarning, match="at least once"):
        trainer.save_as_onnx("nowhere.onnx")
    loss, prediction = trainer(x, label)
    assert_close(loss, cross_entropy(before, label), "loss")
    assert_close(prediction, before, "prediction")
    assert_close(trainer.eval_step(x, label, fetches=["prediction", "loss"])[0], before, "fetched")
    trainer.train()
    loss = trainer(x, label, 0.1, fetches=["loss"])
    assert isinstance(loss, Tensor)
    assert loss.shape == ()
    assert trainer.train_step(x, label, 0.1, fetches=["prediction"]).shape == (5, 3)
    assert len(trainer.train_step(x, label, 0.1)) == 2  # fetches are of one step
    assert trainer.global_step_ == 3
    with pytest.raises(RuntimeError, match="invalid output names"):
        trainer.train_step(x, label, 0.1, fetches=["logits"])
    with pytest.raises(AssertionError, match="'fetches' must be a list of names"):
        trainer.train_step(x, label, 0.1, fetches="loss")
    with pytest.raises(AssertionError, match="model_desc has 2 inputs, and 1 are given"):
        trainer.eval_step(x)


def test_a_program_that_scales_the_loss_itself_is_told_whether_gradients_were_finite() -> None:
    trainer = legacy("AdamOptimizer", use_mixed_precision=True, gradient_accumulation_steps=2)
    assert trainer.loss_scale_input_name == "loss_scale"
    x, label = batch(0)
    loss, prediction = trainer.train_step(x, label, 0.01, 128.0)
    assert (loss.dtype, prediction.dtype) == (torch.float32, torch.float16)
    outputs = trainer.train_step(x, label, 0.01, loss_scale=torch.tensor([128.0]))
    assert (outputs[2].dtype, outputs[2].tolist()) == (torch.bool, [True])
    kept = weights(trainer)
    trainer.train_step(x, label, 0.01, default_loss_scale_input_name=1e38)
    _, _, all_finite = trainer.train_step(x, label, 0.01, 1e38)
    assert not all_finite
    assert all(torch.equal(one, kept[name]) for name, one in weights(trainer).items())
    assert trainer.global_step_ == 1
    assert len(trainer.train_step(x, label, 0.01, 128.0, fetches=["loss", "prediction"])) == 2
    assert len(trainer.train_step(x, label, 0.01, 128.0, fetches=["loss", "prediction"])) == 2
    with pytest.raises(AssertionError, match=r"'Learning_Rate', 'loss_scale'.*and 3 are given"):
        trainer.train_step(x, label, 0.01)


# -- states and files --------------------------------------------------------------------------------------------------


def test_states_are_flat_and_go_on_in_another_trainer(tmp_path: Path) -> None:
    first = legacy("LambOptimizer")
    with pytest.warns(UserWarning, match="at least once"):
        assert first.state_dict() == {}
    for step in range(3):
        first.train_step(*batch(step), 0.1)
    state = first.state_dict()
    names = set(net().state_dict())
    assert state.keys() == {"Step", *names, *(f"Moment_{k}_{name}" for k in (1, 2) for name in names)}
    assert first.state_dict(include_optimizer_state=False).keys() == names
    assert all(np.array_equal(first.session.get_state()[name], state[name].numpy()) for name in names)
    save_checkpoint(first, tmp_path, "run", {"epoch": 3})
    assert (tmp_path / "run.ort.pt").exists()
    save_checkpoint(first, tmp_path, "bare", include_optimizer_state=False)
    second = legacy("LambOptimizer")
    assert load_checkpoint(second, tmp_path, "run", strict=True) == {"epoch": 3}
    x, label = batch(3)
    assert torch.equal(second.train_step(x, label, 0.1)[0], first.train_step(x, label, 0.1)[0])
    for name, value in first.state_dict().items():
        assert torch.equal(second.state_dict()[name], value), name
    assert load_checkpoint(second, tmp_path, "bare") == {}
    assert all(torch.equal(one, state[name]) for name, one in weights(second).items())
    with pytest.warns(UserWarning, match="Missing key: optimizer"):
        load_checkpoint(second, tmp_path, "bare", strict=True)
    with pytest.warns(UserWarning, match="already exists, overwriting"):
        save_checkpoint(first, tmp_path, "run")
    with pytest.raises(AssertionError, match="directory doesn't exist"):
        save_checkpoint(first, tmp_path / "none")


def test_strict_loading_of_an_sgd_trainer_requires_exactly_its_weights() -> None:
    trainer = legacy()
    trainer.train_step(*batch(0), 0.1)
    trainer.load_state_dict(trainer.state_dict(), strict=True)
    trainer.load_state_dict({"fc3.weight": torch.zeros(3)})
    with pytest.raises(RuntimeError, match="Missing keys"):
        trainer.load_state_dict({"fc1.bias": torch.zeros(8)}, strict=True)


def test_the_model_is_written_with_its_trained_weights(tmp_path: Path) -> None:
    optimized = tmp_path / "optimized.onnx"
    trainer = legacy(frozen_weights=["fc1.bias"], optimized_model_filepath=str(optimized))
    x, label = batch(0)
    trainer.train_step(x, label, 0.1)
    assert torch.equal(trainer.state_dict()["fc1.bias"], net().fc1.bias)
    trainer.save_as_onnx(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
    found = session.run(["loss", "prediction"], {"x": x.numpy(), "label": label.numpy()})
    for own, expected in zip(found, trainer.eval_step(x, label), strict=True):
        assert_close(torch.from_numpy(np.asarray(own)), expected, "output")
    assert {one.name for one in trainer.onnx_model_.graph.initializer} >= set(net().state_dict())
    assert onnx.load(optimized).graph.node
