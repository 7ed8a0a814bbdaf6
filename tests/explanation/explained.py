"""Models of the tests of explanations."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.dropout(nn.functional.gelu(self.up(x)), 0.5)
        return self.down(self.norm(hidden)).sum()


def broken(x: Tensor, w: Tensor) -> Tensor:
    y = (x @ w).relu()
    torch._dynamo.graph_break()
    return torch.fft.fft(y).real.sum()


def image_net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 2))
