"""Programs of ranks with stages of a model; adjacent ranks have the same share of a batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from replicated import Normed, joined, make, share, train
from small_trainers import Mlp
from torch import Tensor, nn

from ort_dynamo import optim

__all__ = ["CASES", "cases", "masked", "others"]

_PIPELINE = {"pipeline_parallel_size": 2, "num_pipeline_micro_batches": 2, "pipeline_cut_info_string": "fc2"}

CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (optim.SGDConfig(lr=0.1), {}),
    "adam": (optim.AdamConfig(lr=0.01, max_norm_clip=0.05), {}),
    "lamb": (optim.LambConfig(lr=0.02, max_norm_clip=0.05), {}),
    "accumulation": (optim.AdamConfig(lr=0.01), {"batch": {"gradient_accumulation_steps": 2}}),
}


def cases(rank: int, world: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    own = share(joined(10), rank // 2, world // 2)
    for name, (config, levels) in CASES.items():
        trainer = make(rank, world, config, {**levels, "distributed": {"pipeline_parallel": _PIPELINE}})
        losses = train(trainer, own[:6])
        trainer.save_checkpoint(folder / f"{name}-{rank}")
        running = trainer._running
        assert running is not None
        trained = [weight.name for weight in running.state.weights]
        losses += train(trainer, own[6:])
        evaluated = trainer.eval_step(*own[0])
        trainer.load_checkpoint(*(folder / f"{name}-{one}" for one in range(world)))
        assert train(trainer, own[6:]) == losses[6:]
        found[name] = {"losses": losses, "trained": trained, "eval": [one.numpy() for one in evaluated]}
    return found


class Masked(nn.Module):
    """Three layers: the second and the third read a mask, the first and the third the numbers, none the last input."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, mask: Tensor, input1: Tensor, unread: Tensor) -> Tensor:
        x = torch.tanh(self.fc1(input1))
        x = torch.tanh(self.fc2(x * mask)) * mask
        return self.fc3(x) + input1.sum(1, keepdim=True) * mask[:, :3]


MASKED: dict[str, Any] = {
    "inputs": [("mask", ["batch", 8]), ("input1", ["batch", 4]), ("unread", ["batch"]), ("label", ["batch"])],
    "outputs": [("loss", [], True), ("predictions", ["batch", 3])],
}


def masked_batches(count: int = 6) -> list[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(2)
    masks = [torch.rand(6, 8, generator=generator) < 0.7 for _ in range(count)]
    return [
        (mask, inputs, torch.arange(6), labels) for mask, (inputs, labels) in zip(masks, joined(count, 6), strict=True)
    ]


def masked(rank: int, world: int) -> dict[str, Any]:
    """Train a model whose later stages read inputs; return losses and predictions."""
    stages = {"pipeline_parallel_size": 3, "num_pipeline_micro_batches": 3, "pipeline_cut_info_string": "fc2, fc3"}
    levels = {"distributed": {"pipeline_parallel": stages}} if world > 1 else {}
    trainer = make(rank, world, optim.AdamConfig(lr=0.01), levels, Masked, desc=MASKED)
    data = masked_batches()
    losses = train(trainer, data)
    evaluated = trainer.eval_step(*data[0])
    trainer._train_step_info.fetches = ["predictions"]
    predicted = trainer.eval_step(*data[1][:-1])
    skipping = ""
    if world > 1:
        try:
            make(rank, world, optim.SGDConfig(), levels, Skipping, desc=MASKED).train_step(*data[0])
        except NotImplementedError as error:
            skipping = str(error)
    return {
        "skipping": skipping,
        "losses": losses,
        "eval": [one.numpy() for one in evaluated],
        "predicted": predicted.numpy(),
    }


class Skipping(Masked):
    """Computes in the first stage a tensor that both others need."""

    def forward(self, mask: Tensor, input1: Tensor, unread: Tensor) -> Tensor:
        return super().forward(torch.sigmoid(mask - 0.5), input1, unread)


class Tied(nn.Module):
    """The second stage multiplies by the first one's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.fc2.weight = self.fc1.weight

    def forward(self, input1: Tensor) -> Tensor:
        return self.fc3(self.fc2(torch.tanh(self.fc1(input1))))


class Branching(Mlp):
    """Has a branch that no tracer can follow."""

    def forward(self, input1: Tensor) -> Tensor:
        return super().forward(-input1 if float(input1.sum()) > 0 else input1)


def others(rank: int, world: int) -> dict[str, Any]:
    whole = {"distributed": {"pipeline_parallel": {**_PIPELINE, "num_pipeline_micro_batches": 1}}}
    odd = {"distributed": {"pipeline_parallel": {**_PIPELINE, "num_pipeline_micro_batches": 3}}}
    frozen = {**whole, "utils": {"frozen_weights": ["fc2.weight", "fc2.bias"]}}
    found: dict[str, Any] = {}
    for name, model, levels in (
        ("normed", Normed, whole),
        ("branching", Branching, whole),
        ("odd", Mlp, odd),
        ("tied", Tied, whole),
        ("frozen", Mlp, frozen),
    ):
        try:
            make(rank, world, optim.SGDConfig(), levels, model).train_step(*joined(1)[0])
        except NotImplementedError as error:
            found[name] = str(error)
    return found
