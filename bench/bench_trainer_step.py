"""Times of a step of ORTTrainer with its update, in units of torch with a fused optimizer, eager or inductor.

A step is one session, or a forward and a backward session with an update by torch's kernels. ORTTrainer takes one of
the two by optimizer and size. Gradients are clipped to a norm of 1 if ORTTrainer clips. torch has no LAMB; AdamW
replaces it.
"""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from bench.contestants import SUBJECT, compile_with
from bench.results import Compare
from bench.workloads import Size, Workload, build
from ort_dynamo import ORTTrainer, ORTTrainerOptions, optim

_ROUNDS = {"tiny": 6, "small": 24, "medium": 12}

_WARM_UP_STEPS = 3

Way = Literal["one session", "two halves"]

_CONFIGS = {
    "adam": lambda: optim.AdamConfig(lr=1e-4, lambda_coef=0.01),
    "lamb": lambda: optim.LambConfig(lr=1e-4, lambda_coef=0.01),
    "sgd": lambda: optim.SGDConfig(lr=1e-4),
}


class _TorchStep:
    """Trains a workload with torch's fused optimizer; a call is one step."""

    def __init__(self, workload: Workload, backend: str, optimizer: str) -> None:
        self._workload = workload
        self._loss = compile_with(backend, workload.module)
        self._parameters = list(workload.module.parameters())
        self._clips = optimizer != "sgd"
        kind = torch.optim.AdamW if self._clips else torch.optim.SGD
        self._optimizer = kind(self._parameters, lr=1e-4, fused=True)

    def __call__(self) -> Tensor:
        self._optimizer.zero_grad(set_to_none=True)
        loss: Tensor = self._loss(*self._workload.batch)
        loss.backward()
        if self._clips:
            nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._optimizer.step()
        return loss.detach()


class _TrainerStep:
    """Trains a workload with ORTTrainer, in the way that is asked for; a call is one step."""

    def __init__(self, workload: Workload, optimizer: str, way: Way) -> None:
        self._batch = workload.batch
        inputs = [(f"input_{index}", list(tensor.shape)) for index, tensor in enumerate(workload.batch)]
        description = {"inputs": inputs, "outputs": [("loss", [], True)]}
        options = ORTTrainerOptions({"device": {"id": "cpu"}})
        self._trainer = ORTTrainer(workload.module, description, _CONFIGS[optimizer](), options=options)
        running = self._trainer._run(list(self._batch))
        running._one_session = way == "one session"

    def __call__(self) -> Tensor:
        loss: Tensor = self._trainer.train_step(*self._batch)
        return loss


@pytest.mark.parametrize("way", ["one session", "two halves"])
@pytest.mark.parametrize("optimizer", _CONFIGS)
@pytest.mark.parametrize("workload", ["bert", "gpt2"])
def test_trainer_step(
    workload: str, optimizer: str, way: Way, size: Size, backends: tuple[str, ...], compare: Compare
) -> None:
    steps = {backend: _step(workload, size, backend, optimizer, way) for backend in backends}
    losses = {backend: _warm_up(step) for backend, step in steps.items()}
    same = 1 if optimizer == "lamb" else _WARM_UP_STEPS  # later losses come after another formula's updates
    torch.testing.assert_close(losses[SUBJECT][:same], losses["eager"][:same], rtol=1e-2, atol=1e-3)
    compare("ORTTrainer's step", f"{workload}, {optimizer}, {way}", steps, _ROUNDS[size])


def _step(workload: str, size: Size, backend: str, optimizer: str, way: Way) -> _TorchStep | _TrainerStep:
    built = build(workload, size)
    if backend == SUBJECT:
        return _TrainerStep(built, optimizer, way)
    return _TorchStep(built, backend, optimizer)


def _warm_up(step: _TorchStep | _TrainerStep) -> Tensor:
    """Compile, take a few steps, and give their losses."""
    torch.manual_seed(1)
    return torch.stack([step() for _ in range(_WARM_UP_STEPS)])
