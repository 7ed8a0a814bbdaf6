"""A model of 12 layers, in which one operator is used once."""

from __future__ import annotations

import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Special(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x)


class TwelveLayers(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(width) for _ in range(12)])
        self.special = Special()
        self.head = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index == 6:
                x = self.special(x)
        return nn.functional.cross_entropy(self.head(x), labels)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(8, 16), torch.randint(4, (8,))
