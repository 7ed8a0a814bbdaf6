"""Section 2.5 of ORTTrainer's reference: steps in mixed precision, whose gradients may overflow."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from small_trainers import DESC, FORMS, Mlp, batches, make_trainer, weights
from torch import Tensor

from ort_dynamo import amp, optim
from ort_dynamo.testing import TOLERANCES, assert_close


class Exploding(Mlp):
    """Its gradients overflow where the input says so."""

    def forward(self, input1: Tensor, factor: Tensor) -> Tensor:
        return super().forward(input1) * factor


EXPLODING: dict[str, Any] = {
    "inputs": [("input1", ["batch", 4]), ("factor", []), ("label", ["batch"])],
    "outputs": DESC["outputs"],
}


@FORMS
def test_an_overflow_skips_the_update_and_halves_the_scale(one_session: bool) -> None:
    scaler = amp.DynamicLossScaler(loss_scale=2.0**8, up_scale_window=3)
    trainer = make_trainer(
        optim.AdamConfig(lr=0.01),
        Exploding(),
        desc=EXPLODING,
        one_session=one_session,
        mixed_precision={"enabled": True, "loss_scaler": scaler},
    )
    x, y = batches(1)[0]
    info = trainer._train_step_info
    seen = []
    for factor in (1.0, float("inf"), 1.0, 1.0, 1.0, float("nan")):
        before = None if trainer._running is None else trainer.state_dict()
        trainer.train_step(x, torch.tensor(factor), y)
        seen.append((info.all_finite, info.optimization_step, scaler.loss_scale))
        after = trainer.state_dict()
        if before is not None:
            unchanged = [
                np.array_equal(one, before["model"]["full_precision"][name])
                for name, one in after["model"]["full_precision"].items()
            ]
            assert all(unchanged) != info.all_finite
            moments = (state["optimizer"]["fc1.bias"]["Moment_1"] for state in (before, after))
            assert np.array_equal(*moments) != info.all_finite
    assert seen == [
        (True, 1, 2.0**8),
        (False, 1, 2.0**7),
        (True, 2, 2.0**7),
        (True, 3, 2.0**7),
        (True, 4, 2.0**8),
        (False, 4, 2.0**7),
    ]
    assert info.step == 6
    assert trainer.state_dict()["optimizer"]["fc1.bias"]["Update_Count"] == [5]


@FORMS
def test_an_overflow_in_one_gathered_step_skips_the_update_of_all(one_session: bool) -> None:
    trainer = make_trainer(
        model=Exploding(),
        desc=EXPLODING,
        one_session=one_session,
        mixed_precision={"enabled": True, "loss_scaler": amp.DynamicLossScaler(loss_scale=2.0**8)},
        batch={"gradient_accumulation_steps": 2},
    )
    x, y = batches(1)[0]
    counts = []
    for factor in (float("inf"), 1.0, 1.0, 1.0):
        trainer.train_step(x, torch.tensor(factor), y)
        counts.append(trainer._train_step_info.optimization_step)
    assert counts == [0, 0, 0, 1]
    assert all(np.isfinite(one).all() for one in weights(trainer).values())


def test_predictions_are_float16_and_the_loss_float32_under_mixed_precision() -> None:
    trainer = make_trainer(mixed_precision={"enabled": True})
    x, y = batches(1)[0]
    for step in (trainer.train_step, trainer.eval_step):
        loss, prediction = step(x, y)
        assert (loss.dtype, prediction.dtype) == (torch.float32, torch.float16)
    assert isinstance(trainer.options.mixed_precision.loss_scaler, amp.DynamicLossScaler)
    model = trainer._torch_model
    assert model is not None
    with torch.autocast("cpu", torch.float16):
        expected = Mlp.forward(model, x).detach()  # type: ignore[arg-type]
    trainer = make_trainer(mixed_precision={"enabled": True})
    assert_close(trainer.train_step(x, y)[1], expected, "predictions", TOLERANCES[torch.float16])


def test_a_scaler_of_the_programs_own_is_asked_after_each_update() -> None:
    class Counting(amp.LossScaler):
        """Doubles at each update."""

        def __init__(self) -> None:
            super().__init__(4.0)
            self.told: list[tuple[int, int, bool]] = []

        def update(self, train_step_info: Any) -> None:
            self.told.append((train_step_info.step, train_step_info.optimization_step, train_step_info.all_finite))
            self.loss_scale *= 2

        def reset(self) -> None:
            self.loss_scale = 4.0

    scaler = Counting()
    trainer = make_trainer(
        mixed_precision={"enabled": True, "loss_scaler": scaler}, batch={"gradient_accumulation_steps": 2}
    )
    for batch in batches(4):
        trainer.train_step(*batch)
    assert scaler.told == [(2, 0, True), (4, 1, True)]
    assert scaler.loss_scale == 16.0
