"""Configurations, data and a plain loop of trainers whose models take rows of numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ort_dynamo import optim

CONFIGS: dict[str, Any] = {
    "sgd": lambda: optim.SGDConfig(lr=0.1),
    "adam": lambda: optim.AdamConfig(lr=0.01),
    "lamb": lambda: optim.LambConfig(lr=0.01),
}
WIDTH = 8
ROWS: dict[str, Any] = {
    "inputs": [("x", ["length", "batch", WIDTH]), ("target", ["length", "batch"])],
    "outputs": [("loss", [], True), ("predictions", ["length", "batch"])],
}
FIXED_ROWS: dict[str, Any] = {
    "inputs": [("x", [5, 3, WIDTH]), ("target", [5, 3])],
    "outputs": [("loss", [], True), ("predictions", [5, 3])],
}


def squares(prediction: Tensor, target: Tensor) -> Tensor:
    return (prediction - target).square().mean()


def rows(length: int = 5, batch: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(length, batch, WIDTH, generator=generator), torch.randn(length, batch, generator=generator)


def plain_losses(model: nn.Module, lr: float, data: list[tuple[Tensor, Tensor]]) -> list[float]:
    """The losses of SGD in torch."""
    losses = []
    for x, target in data:
        loss = squares(model(x), target)
        gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        for one, gradient in zip(model.parameters(), gradients, strict=True):
            if gradient is not None:
                one.data -= lr * gradient
        losses.append(loss.item())
    return losses
