"""A small model, its trainers, and the plain loop that they are compared with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from formulas import adam_step, hyperparameters_of, lamb_step, scale_of, sgd_step
from torch import Tensor, nn

from ort_dynamo import ORTTrainer, ORTTrainerOptions, optim
from ort_dynamo.testing import TOLERANCES, Tolerance, assert_close

__all__ = [
    "DESC",
    "FORMS",
    "SGD",
    "Mlp",
    "PlainLoop",
    "assert_same_weights",
    "batches",
    "classify",
    "forced",
    "losses",
    "make_options",
    "make_trainer",
    "weights",
]

DESC: dict[str, Any] = {
    "inputs": [("input1", ["batch", 4]), ("label", ["batch"])],
    "outputs": [("loss", [], True), ("predictions", ["batch", 3])],
}
SGD = optim.SGDConfig(lr=0.1)
FORMS = pytest.mark.parametrize("one_session", [True, False], ids=["one session", "two halves"])


class Mlp(nn.Module):
    """Two layers, four numbers in and three out."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.fc1 = nn.Linear(4, 8)
        self.drop = nn.Dropout(dropout)
        self.fc2 = nn.Linear(8, 3)

    def forward(self, input1: Tensor) -> Tensor:
        return self.fc2(self.drop(torch.tanh(self.fc1(input1))))


def classify(prediction: Tensor, label: Tensor) -> Tensor:
    return nn.functional.cross_entropy(prediction, label)


def batches(count: int, size: int = 6, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Inputs and labels of Mlp."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, 4, generator=generator), torch.randint(0, 3, (size,), generator=generator))
        for _ in range(count)
    ]


def make_options(**levels: Any) -> ORTTrainerOptions:
    """Options for the CPU: make_options(utils={"frozen_weights": []})."""
    return ORTTrainerOptions({"device": {"id": "cpu"}, **levels})


def make_trainer(
    config: Any = None,
    model: nn.Module | None = None,
    *,
    desc: dict[str, Any] = DESC,
    loss_fn: Callable[[Any, Any], Tensor] | None = classify,
    one_session: bool | None = None,
    **levels: Any,
) -> ORTTrainer:
    """Make a trainer of Mlp, or of a model, on the CPU.

    Args:
        one_session: whether its steps run as one session or as forward and backward; None leaves the choice to it.
        levels: of ORTTrainerOptions.
    """
    if model is None:
        torch.manual_seed(1)
        model = Mlp()
    trainer = ORTTrainer(model, desc, config or optim.SGDConfig(lr=0.1), loss_fn, make_options(**levels))
    return trainer if one_session is None else forced(trainer, one_session)


def forced(trainer: ORTTrainer, one_session: bool) -> ORTTrainer:
    """Make a trainer that has not run yet take one of the two forms of a step."""
    made = trainer._build_model

    def make(inputs: Any) -> Any:
        running = made(inputs)
        running._one_session = one_session
        return running

    trainer._build_model = make  # type: ignore[method-assign]
    return trainer


def weights(trainer: ORTTrainer) -> dict[str, np.ndarray[Any, Any]]:
    """All weights and buffers, in full precision."""
    found: dict[str, np.ndarray[Any, Any]] = trainer.state_dict()["model"]["full_precision"]
    return found


class PlainLoop:
    """Trains a copy of a model: torch computes gradients, the formulas of formulas.py update in float64.

    Args:
        model: stays as it is.
        config: the optimizer's.
        loss_fn: as of a trainer; None where the model gives the loss first.
        clips: whether gradients are clipped.
        gathers: steps for each update.
        dtype: of the model while it computes.
    """

    def __init__(
        self,
        model: nn.Module,
        config: Any,
        loss_fn: Callable[[Any, Any], Tensor] | None = classify,
        *,
        clips: bool = True,
        gathers: int = 1,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.model = copy.deepcopy(model).to(dtype)
        self._dtype = dtype
        self._config = config
        self._loss_fn = loss_fn
        self._clips = clips
        self._gathers = gathers
        self._trained = {name: one for name, one in self.model.named_parameters() if one.requires_grad}
        self.weights = {name: one.detach().double().numpy().copy() for name, one in self._trained.items()}
        self.moments = {name: (np.zeros_like(one), np.zeros_like(one)) for name, one in self.weights.items()}
        self._sums = {name: np.zeros_like(one) for name, one in self.weights.items()}
        self._steps = self._updates = 0

    def step(self, *inputs: Tensor, lr: float | None = None) -> float:
        """Run one step; gives the loss before the update."""
        given = [one.to(self._dtype) if one.is_floating_point() else one for one in inputs]
        if self._loss_fn is None:
            found = self.model(*given)
            loss = next(iter(found.values())) if hasattr(found, "values") else found[0]
        else:
            loss = self._loss_fn(self.model(*given[:-1]), given[-1])
        gradients = torch.autograd.grad(loss, list(self._trained.values()), allow_unused=True)
        for name, gradient in zip(self._trained, gradients, strict=True):
            if gradient is not None:
                self._sums[name] += gradient.double().numpy() / self._gathers
        self._steps += 1
        if self._steps % self._gathers == 0:
            self._update(self._config.lr if lr is None else lr)
        return loss.item()

    def _update(self, lr: float) -> None:
        self._updates += 1
        for name in self.weights:
            group = next((one for one in self._config.params if name in one["params"]), self._config.defaults)
            max_norm = group.get("max_norm_clip", 1.0)
            clips = self._clips and "max_norm_clip" in group
            divisor, _ = scale_of(self._sums.values(), 1.0, max_norm, clips)
            self._update_one(name, self._sums[name] / divisor, lr)
        for total in self._sums.values():
            total[...] = 0

    def _update_one(self, name: str, gradient: Any, lr: float) -> None:
        w = self.weights[name]
        if isinstance(self._config, optim.SGDConfig):
            w = sgd_step(w, gradient, lr)
        else:
            step = adam_step if isinstance(self._config, optim.AdamConfig) else lamb_step
            settings = {**hyperparameters_of(name, self._config), "lr": lr}
            w, *moments = step(w, *self.moments[name], self._updates, gradient, **settings)
            self.moments[name] = tuple(moments)  # type: ignore[assignment]
        self.weights[name] = w
        with torch.no_grad():
            self._trained[name].copy_(torch.from_numpy(w))


def assert_same_weights(
    trainer: ORTTrainer, expected: dict[str, Any], what: str = "", tolerance: Tolerance | None = None
) -> None:
    """Compare the trained weights with the expected ones."""
    found = weights(trainer)
    limit = tolerance or TOLERANCES[torch.float32]
    for name, value in expected.items():
        own = torch.from_numpy(np.asarray(value)).to(torch.float32)
        assert_close(torch.from_numpy(found[name]), own, f"{what} {name}", limit, strides=False)


def losses(trainer: ORTTrainer, data: Sequence[tuple[Any, ...]]) -> list[float]:
    """The losses of a step for each batch."""
    return [float(found[0] if isinstance(found, list) else found) for found in (trainer.train_step(*b) for b in data)]
