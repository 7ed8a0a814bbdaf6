"""The demo's two models, in plain torch. Called with targets they return the loss, without them the logits."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["ByteGPT", "DigitsNet"]


class DigitsNet(nn.Module):
    """A small residual network for 8 × 8 images in ten classes.

    SiLU and average pooling, not ReLU and max pooling: where a kink decides, a rounding difference in the last bit
    sends two trainings apart, and their curves would say nothing (docs/reference/numerics.md).
    """

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.stem: nn.Sequential = nn.Sequential(_conv3x3(1, width), nn.BatchNorm2d(width), nn.SiLU())
        self.first: _ResidualBlock = _ResidualBlock(width, width)
        self.pool: nn.AvgPool2d = nn.AvgPool2d(2)
        self.second: _ResidualBlock = _ResidualBlock(width, 2 * width)
        self.dropout: nn.Dropout = nn.Dropout(0.1)
        self.head: nn.Linear = nn.Linear(2 * width, 10)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        """Images (batch, 1, 8, 8) float -> logits (batch, 10), or with labels (batch,) int64 the mean loss, ()."""
        hidden = self.second(self.pool(self.first(self.stem(images))))
        hidden = functional.adaptive_avg_pool2d(hidden, 1).flatten(1)
        logits: Tensor = self.head(self.dropout(hidden))
        return logits if labels is None else functional.cross_entropy(logits, labels)


class _ResidualBlock(nn.Module):
    """He et al., 2016 (https://arxiv.org/abs/1512.03385), figure 2: two convolutions and a shortcut around them."""

    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        self.residual: nn.Sequential = nn.Sequential(
            _conv3x3(channels_in, channels),
            nn.BatchNorm2d(channels),
            nn.SiLU(),
            _conv3x3(channels, channels),
            nn.BatchNorm2d(channels),
        )
        self.shortcut: nn.Module = nn.Identity()
        if channels_in != channels:
            self.shortcut = nn.Conv2d(channels_in, channels, kernel_size=1, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return functional.silu(self.shortcut(hidden) + self.residual(hidden))


def _conv3x3(channels_in: int, channels: int) -> nn.Conv2d:
    return nn.Conv2d(channels_in, channels, kernel_size=3, padding=1, bias=False)  # BatchNorm has the bias


class ByteGPT(nn.Module):
    """A decoder-only transformer over bytes: pre-norm blocks, learned positions, tied embeddings.

    Radford et al., 2019 (Language Models are Unsupervised Multitask Learners), with 256 tokens.
    """

    def __init__(
        self, context: int = 64, width: int = 128, layers: int = 2, heads: int = 4, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.context = context
        self.tokens: nn.Embedding = nn.Embedding(256, width)
        self.positions: nn.Embedding = nn.Embedding(context, width)
        self.dropout: nn.Dropout = nn.Dropout(dropout)
        self.blocks: nn.ModuleList = nn.ModuleList(_DecoderBlock(width, heads, dropout) for _ in range(layers))
        self.norm: nn.LayerNorm = nn.LayerNorm(width)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Tokens (batch, time) int64 -> logits (batch, time, 256), or with targets (batch, time) the mean loss, ()."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.dropout(self.tokens(tokens) + self.positions(places))
        for block in self.blocks:
            hidden = block(hidden)
        logits = functional.linear(self.norm(hidden), self.tokens.weight)
        return logits if targets is None else functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class _DecoderBlock(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = _CausalAttention(width, heads, dropout)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden))
        updated: Tensor = hidden + self.mlp(self.mlp_norm(hidden))
        return updated


class _CausalAttention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        # No bias: a key bias has the exact gradient 0, and AdamW would make full steps of its rounding noise.
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.dropout: nn.Dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, time, width = hidden.shape
        query, key, value = (
            part.view(batch, time, self.heads, width // self.heads).transpose(1, 2)
            for part in self.query_key_value(hidden).chunk(3, dim=-1)
        )
        mixed = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropout.p if self.training else 0.0, is_causal=True
        )
        dropped: Tensor = self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, time, width)))
        return dropped
