"""Trainers that have taken some steps."""

from __future__ import annotations

from typing import Any

import torch
from small_trainers import batches, losses, make_trainer
from torch import Tensor, nn

from ort_dynamo import ORTTrainer, optim

CONFIGS: dict[str, Any] = {
    "sgd": lambda: optim.SGDConfig(lr=0.1),
    "adam": lambda: optim.AdamConfig([{"params": ["fc1.weight"], "alpha": 0.8}], lr=0.01, lambda_coef=0.01),
    "lamb": lambda: optim.LambConfig(lr=0.01),
}
WEIGHTS = ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")


class Normed(nn.Module):
    """With buffers and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(4, 8)
        self.bn = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.2)
        self.fc2 = nn.Linear(8, 3)

    def forward(self, input1: Tensor) -> Tensor:
        return self.fc2(self.drop(self.bn(self.fc1(input1))))


class Scaled(Normed):
    """With a factor that is its extra state, along with one of a layer; and a buffer of a dtype that NumPy lacks."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.factor = factor
        self.register_buffer("small", torch.tensor([0.5, 3.0]).to(torch.float8_e4m3fn))

    def forward(self, input1: Tensor) -> Tensor:
        return super().forward(input1) * self.factor

    def get_extra_state(self) -> dict[str, Any]:
        return {"factor": self.factor, "seen": (torch.ones(2), None)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        assert isinstance(state["seen"][0], Tensor)
        self.factor = state["factor"]


def trained(config: str = "adam", steps: int = 2, **arguments: Any) -> ORTTrainer:
    trainer = make_trainer(CONFIGS[config](), **arguments)
    losses(trainer, batches(steps))
    return trainer
