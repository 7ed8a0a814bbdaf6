"""What ranks do that share layers: neighbours have the same share of a batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from replicated import joined, make, share, train
from torch import Tensor, nn

from ort_dynamo import optim

__all__ = ["CASES", "Attention", "TooManyHeads", "cases"]


class Attention(nn.Module):
    """Attention over two tokens, a layer norm, two linear layers, and one that is not divided."""

    heads: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(2, 8)
        self.block = nn.ModuleDict(
            {"q_proj": nn.Linear(8, 8), "k_proj": nn.Linear(8, 8), "v_proj": nn.Linear(8, 8), "o_proj": nn.Linear(8, 8)}
        )
        self.norm = nn.LayerNorm(8)
        self.feed = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.head = nn.Linear(8, 3)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, input1: Tensor) -> Tensor:
        x = self.embed(input1.view(-1, 2, 2))
        q, k, v = (
            self.block[name](x).view(*x.shape[:2], self.heads or -1, 2).transpose(1, 2)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.block["o_proj"](mixed)
        return self.head((x + self.feed(self.norm(x))).mean(1) * self.scale)


class TooManyHeads(Attention):
    """Takes it for granted that there are four heads."""

    heads = 4


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (optim.SGDConfig(lr=0.1), {}),
    "adam": (optim.AdamConfig(lr=0.01, max_norm_clip=0.05), {}),
    "lamb": (optim.LambConfig(lr=0.02, max_norm_clip=0.05, lambda_coef=0.01), {}),
    "accumulation": (optim.AdamConfig(lr=0.01), {"batch": {"gradient_accumulation_steps": 4}}),
    "accumulation, then reduction": (
        optim.AdamConfig(lr=0.01),
        {"batch": {"gradient_accumulation_steps": 4}, "distributed": {"allreduce_post_accumulation": True}},
    ),
}


def cases(rank: int, world: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    own = share(joined(24), rank // 2, world // 2)
    for name, (config, levels) in CASES.items():
        divided = {**levels, "distributed": {"horizontal_parallel_size": 2, **levels.get("distributed", {})}}
        trainer = make(rank, world, config, divided, Attention)
        losses = train(trainer, own[:20])
        trainer.save_checkpoint(folder / f"{name}-{rank}")
        elements = trainer._running.state.elements  # type: ignore[union-attr]
        losses += train(trainer, own[20:])
        paths = [folder / f"{name}-{one}" for one in range(world)]
        torch.distributed.barrier()
        trainer.load_checkpoint(*paths)
        again = train(trainer, own[20:])
        assert again == losses[20:], (again, losses[20:])
        found[name] = {"losses": losses, "elements": elements, "eval": float(trainer.eval_step(*own[0])[0])}
    refused = make(rank, world, CASES["sgd"][0], {"distributed": {"horizontal_parallel_size": 2}}, TooManyHeads)
    try:
        refused.train_step(*own[0])
    except NotImplementedError as error:
        found["refused"] = str(error)
    return found
