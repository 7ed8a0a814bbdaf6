"""A trainer names the input whose dtype or shape the model does not take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_trainers import DESC, batches, classify, make_trainer
from torch import nn

from ort_dynamo.errors import InputDtypeError, InvalidArgumentError
from ort_dynamo.training import ORTTrainer, ORTTrainerOptions, optim
from ort_dynamo.training.model_desc_validation import _ORTTrainerModelDesc
from ort_dynamo.training.trainer.guarded_step import GuardedSteps


@pytest.mark.parametrize("one_session", [True, False], ids=["one session", "two halves"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int64])
def test_an_input_of_another_dtype_is_named(dtype: torch.dtype, one_session: bool) -> None:
    x, label = batches(1)[0]
    trainer = make_trainer(one_session=one_session)
    with pytest.raises(InputDtypeError, match="must have the same dtype") as raised:
        trainer.train_step(x.to(dtype), label)
    assert f"'input1' is {str(dtype).removeprefix('torch.')}" in str(raised.value)
    assert "the model's weights are float32" in str(raised.value)
    assert isinstance(raised.value, RuntimeError)
    with pytest.raises(InputDtypeError, match="'input1' is"):
        trainer.eval_step(x.to(dtype), label)
    loss, _ = trainer.train_step(x, label)  # nothing is left behind
    assert loss.isfinite()


def test_a_label_of_another_dtype_is_named() -> None:
    x, label = batches(1)[0]
    with pytest.raises(InputDtypeError, match="'label' is int32"):
        make_trainer().train_step(x, label.to(torch.int32))


@pytest.mark.parametrize("one_session", [True, False], ids=["one session", "two halves"])
@pytest.mark.parametrize("loss_fn", [nn.CrossEntropyLoss(), classify], ids=["module", "function"])
def test_a_label_that_the_loss_function_refuses_is_named(
    loss_fn: Any, one_session: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    x, label = batches(1)[0]
    trainer = make_trainer(loss_fn=loss_fn, one_session=one_session)
    name = "classify" if loss_fn is classify else "CrossEntropyLoss"
    said = f"The loss function {name} raised this for the input 'label' of dtype float32."
    for step in (trainer.train_step, trainer.eval_step):
        with pytest.raises(InputDtypeError) as raised:
            step(x, label.float())
        assert str(raised.value).splitlines()[-1] == said
    assert "Traceback" not in capfd.readouterr().err  # of torch's log
    assert trainer.train_step(x, label)[0].isfinite()


def test_an_error_of_the_loss_function_without_the_labels_dtype_is_raised_as_it_is() -> None:
    def fails(prediction: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(prediction[:2], label)

    with pytest.raises(Exception, match=r"batch_size|batch size|Expected input") as raised:
        make_trainer(loss_fn=fails).train_step(*batches(1)[0])
    assert not isinstance(raised.value, InputDtypeError)


@pytest.mark.parametrize("one_session", [True, False], ids=["one session", "two halves"])
def test_a_refused_step_warns_of_no_fallback_and_is_no_example(
    one_session: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch._dynamo.reset()  # each fallback is warned about once
    x, label = batches(1)[0]
    trainer = make_trainer(one_session=one_session)
    for step in (trainer.train_step, trainer.eval_step):
        with pytest.raises(InputDtypeError):
            step(x.double(), label)
    assert "in eager (fallback)" not in caplog.text
    trainer.train_step(x, label)
    trainer.save_as_onnx(tmp_path / "model.onnx")
    assert (tmp_path / "model.onnx").exists()


class Spectrum(nn.Module):
    """Has an operator that runs in eager, and takes inputs of any width."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.fft(x * self.scale).abs().mean()


def spectrum_trainer() -> ORTTrainer:
    description = {"inputs": [("x", ["batch", 4])], "outputs": [("loss", [], True)]}
    options = ORTTrainerOptions({"device": {"id": "cpu"}})
    return ORTTrainer(Spectrum(), description, optim.SGDConfig(lr=0.1), options=options)


def test_a_step_that_runs_warns_of_its_fallbacks(caplog: pytest.LogCaptureFixture) -> None:
    torch._dynamo.reset()
    spectrum_trainer().train_step(torch.randn(2, 4))
    said = [record.getMessage() for record in caplog.records if "in eager (fallback)" in record.getMessage()]
    assert any("_fft" in one and "test_input_dtypes.py" in one for one in said)


def test_other_static_sizes_run_if_the_model_takes_them() -> None:
    trainer = spectrum_trainer()
    assert trainer.train_step(torch.randn(2, 4)).isfinite()
    assert trainer.train_step(torch.randn(2, 5)).isfinite()
    assert trainer.eval_step(torch.randn(3, 6)).isfinite()


@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize("one_session", [True, False], ids=["one session", "two halves"])
def test_an_input_of_another_shape_is_named(one_session: bool, warm: bool, capfd: pytest.CaptureFixture[str]) -> None:
    x, label = batches(1)[0]
    trainer = make_trainer(one_session=one_session)
    if warm:
        trainer.train_step(x, label)
    for step in (trainer.train_step, trainer.eval_step):
        with pytest.raises(InvalidArgumentError) as raised:
            step(torch.cat([x, x], 1), label)
        given = f"[float32{[x.shape[0], 2 * x.shape[1]]}, int64{[*label.shape]}]"
        assert str(raised.value).startswith(f"{step.__name__}() cannot take inputs={given}: expected 'input1' of ")
        assert str(raised.value).endswith(", as model_desc says.")
        assert raised.value.__cause__ is not None
    assert "Traceback" not in capfd.readouterr().err  # of torch's log
    assert trainer.train_step(x, label)[0].isfinite()


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), ZeroDivisionError("by zero")])
def test_an_error_that_is_not_of_the_shape_is_raised_as_it_is(error: Exception) -> None:
    steps, described = GuardedSteps(), _ORTTrainerModelDesc(DESC).inputs

    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as raised:
        steps("train_step", fail, [torch.zeros(3, 5), torch.zeros(3)], described)
    assert raised.value is error


def test_an_error_after_a_step_of_the_same_shapes_is_raised_as_it_is() -> None:
    steps, described, inputs = GuardedSteps(), _ORTTrainerModelDesc(DESC).inputs, [torch.zeros(3, 5), torch.zeros(3)]

    def fail() -> None:
        raise RuntimeError("later")

    with pytest.raises(InvalidArgumentError):
        steps("train_step", fail, inputs, described)
    steps("train_step", lambda: None, inputs, described)
    with pytest.raises(RuntimeError, match="later"):
        steps("train_step", fail, inputs, described)
