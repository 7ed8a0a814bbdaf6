"""A small GPT as people write it for torch's tensor parallelism, its data, and the same training in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

from ort_dynamo.report.record import RECORDS

VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH = 61, 64, 4, 2, 16
BATCH, STEPS = 8, 20


class Attention(nn.Module):
    """Attention by torch's operator or, for DTensors on a CPU, for which torch cannot shard that, spelled out."""

    mask: torch.Tensor

    def __init__(self, dropout: float, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        if not fused:
            self.register_buffer("mask", torch.full((LENGTH, LENGTH), -torch.inf).triu(1))
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.o = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        # As many heads as this rank has columns for.
        q, k, v = (
            layer(x).view(batch, length, -1, WIDTH // HEADS).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            mixed = (q @ k.mT / (WIDTH // HEADS) ** 0.5 + self.mask).softmax(-1) @ v
        return self.dropout(self.o(mixed.transpose(1, 2).reshape(batch, length, -1)))


class Feed(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.narrow(F.gelu(self.wide(x))))


class Block(nn.Module):
    def __init__(self, dropout: float, fused: bool) -> None:
        super().__init__()
        self.before_attention, self.before_feed = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.feed = Attention(dropout, fused), Feed(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.before_attention(x))
        return x + self.feed(self.before_feed(x))


class GPT(nn.Module):
    positions: torch.Tensor

    def __init__(self, dropout: float = 0.0, fused: bool = True) -> None:
        super().__init__()
        self.register_buffer("positions", torch.arange(LENGTH))
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(dropout, fused) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places(self.positions)
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make(dropout: float = 0.0, fused: bool = True) -> GPT:
    """The model that every rank begins with."""
    torch.manual_seed(0)
    return GPT(dropout, fused)


def batches(steps: int = STEPS) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Give the joined batches, equal on each rank: tokens of a learnable random walk, and the next tokens."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        begin = torch.randint(VOCABULARY, (BATCH, 1), generator=generator)
        walk = (begin + 3 * torch.arange(LENGTH + 1)) % VOCABULARY
        yield walk[:, :-1].contiguous(), walk[:, 1:].contiguous()


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3, foreach=False)


def alone(steps: int = STEPS) -> list[float]:
    """Losses of one process in eager on the joined batches."""
    model = make()
    optimizer = adam(model.parameters())
    losses = []
    for tokens, labels in batches(steps):
        optimizer.zero_grad()
        loss = loss_of(model(tokens), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def compiled(module: Any, **options: Any) -> Any:
    return torch.compile(module, backend="ort_train", options=options or None)


@dataclass(frozen=True)
class Ran:
    """The observations of one rank.

    Attributes:
        losses: of the joined batch, step by step.
        counts: Dynamo's counters "ort_train": graphs, islands, nodes.
        eager: reason -> nodes in eager.
        collectives: overload -> nodes that torch runs by design.
        graphs: role and islands of each compiled graph.
    """

    losses: list[float]
    counts: dict[str, int]
    eager: dict[str, int]
    collectives: dict[str, int]
    graphs: list[tuple[str, int]]


def ran(losses: list[float]) -> Ran:
    return Ran(
        losses,
        dict(counters["ort_train"]),
        dict(counters["ort_train_eager"]),
        dict(counters["ort_train_by_design"]),
        [(graph.role, len(graph.islands)) for record in RECORDS for graph in record.graphs],
    )


Program = Callable[..., list[float]]
