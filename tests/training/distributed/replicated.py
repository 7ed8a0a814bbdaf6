"""Programs of data parallel ranks: each trains on its share of the batches of small_trainers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from small_trainers import DESC, Mlp, batches, classify, make_options
from torch import Tensor, distributed, nn

from ort_dynamo import ORTTrainer, amp, optim
from ort_dynamo.training.ort_trainer import IODescription, ModelDescription
from ort_dynamo.training.ort_trainer import ORTTrainer as FirstTrainer

__all__ = ["CASES", "Normed", "cases", "joined", "make", "resume", "resume_within", "save", "share", "train"]

SIZE = 8
"""The size of a joined batch, which divides by 1, 2 and 4."""

CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (optim.SGDConfig(lr=0.1), {}),
    "adam": (optim.AdamConfig(lr=0.01, max_norm_clip=0.05), {}),
    "lamb": (optim.LambConfig(lr=0.02, max_norm_clip=0.05), {}),
    "each step's gradients are reduced": (optim.AdamConfig(lr=0.01), {"batch": {"gradient_accumulation_steps": 4}}),
    "only an update's are": (
        optim.AdamConfig(lr=0.01),
        {"batch": {"gradient_accumulation_steps": 4}, "distributed": {"allreduce_post_accumulation": True}},
    ),
    "zero": (optim.AdamConfig(lr=0.01), {"distributed": {"deepspeed_zero_optimization": {"stage": 1}}}),
    "zero, lamb": (optim.LambConfig(lr=0.02), {"distributed": {"deepspeed_zero_optimization": {"stage": 1}}}),
    "zero, sgd, groups": (
        optim.SGDConfig(lr=0.1),
        {"distributed": {"deepspeed_zero_optimization": {"stage": 1}}, "utils": {"frozen_weights": ["fc1.bias"]}},
    ),
}


class Normed(nn.Module):
    """With a weight that no loss depends on, and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.unused = nn.Linear(4, 4)
        self.fc2 = nn.Linear(8, 3)

    def forward(self, input1: Tensor) -> Tensor:
        return self.fc2(torch.tanh(self.norm(self.fc1(input1))))


def joined(count: int = 20, size: int = SIZE) -> list[tuple[Tensor, Tensor]]:
    return batches(count, size)


def share(data: list[tuple[Tensor, Tensor]], rank: int, world: int) -> list[tuple[Tensor, Tensor]]:
    return [(inputs.chunk(world)[rank], labels.chunk(world)[rank]) for inputs, labels in data]


def make(
    rank: int,
    world: int,
    config: Any,
    levels: dict[str, Any],
    model: type[nn.Module] = Mlp,
    seed: int | None = None,
    desc: dict[str, Any] = DESC,
) -> ORTTrainer:
    """A trainer whose weights before the first step are each rank's own."""
    torch.manual_seed(rank + 1 if seed is None else seed)
    own = {"world_size": world, "world_rank": rank, "local_rank": rank, **levels.get("distributed", {})}
    return ORTTrainer(model(), desc, config, classify, make_options(**{**levels, "distributed": own}))


def train(trainer: ORTTrainer, data: Sequence[tuple[Tensor, ...]]) -> list[float]:
    return [float(trainer.train_step(*batch)[0]) for batch in data]


def weights_of(trainer: ORTTrainer) -> dict[str, Any]:
    return {name: one.numpy() for name, one in trainer.state_dict(pytorch_format=True).items()}


def cases(rank: int, world: int) -> dict[str, Any]:
    """Train each case, and check the other parts of a step."""
    found: dict[str, Any] = {}
    for name, (config, levels) in CASES.items():
        trainer = make(rank, world, config, levels)
        losses = train(trainer, share(joined(), rank, world))
        running = trainer._running
        assert running is not None
        moments = sum(one.numel() for weight in running.state.weights for one in weight.moments)
        found[name] = {"losses": losses, "weights": weights_of(trainer), "moments": moments}
    return {
        "cases": found,
        "overflow": overflow(rank, world),
        "buffers": buffers(rank, world),
        "first": first(rank, world),
    }


def overflow(rank: int, world: int) -> Any:
    """One rank's gradients overflow in the third step."""
    scaler = amp.DynamicLossScaler(loss_scale=1024.0)
    levels = {"mixed_precision": {"enabled": True, "loss_scaler": scaler}}
    trainer = make(rank, world, optim.AdamConfig(lr=0.01), levels)
    seen = []
    for index, (inputs, labels) in enumerate(share(joined(4), rank, world)):
        if index == 2 and rank == world - 1:
            inputs = inputs * float("inf")
        trainer.train_step(inputs, labels)
        info = trainer._train_step_info
        seen.append((info.all_finite, info.optimization_step, scaler.loss_scale, weights_of(trainer)))
    return seen


def buffers(rank: int, world: int) -> Any:
    """Weights and buffers where ranks begin with their own, and one weight is not reached."""
    trainer = make(rank, world, optim.AdamConfig(lr=0.01), {}, Normed)
    train(trainer, share(joined(3), rank, world))
    trainer.eval_step(*joined(1)[0])
    return weights_of(trainer)


def first(rank: int, world: int) -> list[float]:
    """Losses of the trainer that has no argument for local_rank."""
    inputs = [
        IODescription("input1", ["batch", 4], torch.float32),
        IODescription("label", ["batch"], torch.int64, num_classes=3),
    ]
    outputs = [IODescription("loss", [], torch.float32), IODescription("predictions", ["batch", 3], torch.float32)]
    described, rate = ModelDescription(inputs, outputs), IODescription("rate", [1], torch.float32)
    torch.manual_seed(rank + 1)
    trainer = FirstTrainer(
        Mlp(), classify, described, "SGDOptimizer", None, rate, "cpu", world_rank=rank, world_size=world
    )
    return [float(trainer.train_step(*batch, 0.1)[0]) for batch in share(joined(), rank, world)]


# -- Adasum --------------------------------------------------------------------------------------------------------


def adasum(rank: int, world: int) -> dict[str, Any]:
    """One step of gradient descent with the rate 1: the weights' difference is the reduced gradient."""
    levels = {"distributed": {"enable_adasum": True}}
    trainer = make(rank, world, optim.SGDConfig(lr=1.0), levels, seed=1)
    train(trainer, share(joined(1), rank, world))
    return weights_of(trainer)


# -- checkpoints ---------------------------------------------------------------------------------------------------

SAVED: dict[str, tuple[type[nn.Module], Any]] = {
    "adam": (Mlp, optim.AdamConfig(lr=0.01)),
    "lamb": (Mlp, optim.LambConfig(lr=0.02)),
    "sgd": (Mlp, optim.SGDConfig(lr=0.1)),
    "normed": (Normed, optim.AdamConfig(lr=0.01)),
}
_ZERO = {"distributed": {"deepspeed_zero_optimization": {"stage": 1}}}


def save(rank: int, world: int, folder: Path) -> dict[str, list[float]]:
    """Train ten steps with ZeRO, save, and go on for ten."""
    found = {}
    for name, (model, config) in SAVED.items():
        trainer = make(rank, world, config, _ZERO, model)
        data = share(joined(), rank, world)
        train(trainer, data[:10])
        trainer.save_checkpoint(folder / f"{name}-{rank}", {"epoch": 3})
        found[name] = train(trainer, data[10:])
        trainer.load_checkpoint(*(folder / f"{name}-{one}" for one in _after_all(world)))
        assert np.allclose(train(trainer, data[10:]), found[name], rtol=1e-5, atol=1e-6)
    return found


def _after_all(world: int) -> range:
    """The ranks, once all of them are here."""
    distributed.barrier()
    return range(world)


def resume(rank: int, world: int, folder: Path, saved: int) -> dict[str, list[float]]:
    """Load the checkpoints of `saved` ranks, and train for ten more steps."""
    found = {}
    for name, (model, config) in SAVED.items():
        trainer = make(rank, world, config, _ZERO, model)
        assert trainer.load_checkpoint(*(folder / f"{name}-{one}" for one in range(saved))) == {"epoch": 3}
        found[name] = train(trainer, share(joined(), rank, world)[10:])
    return found


class BySize(Normed):
    """Has one layer more for a small batch."""

    def forward(self, input1: Tensor) -> Tensor:
        hidden = self.fc1(input1) if input1.shape[0] > 2 else self.fc1(self.unused(input1))
        return self.fc2(torch.tanh(hidden))


def resume_within(rank: int, world: int) -> list[dict[str, Any]]:
    """The weights after an accumulation that goes on, and after one that resumes where fewer weights are reached."""
    levels = {"batch": {"gradient_accumulation_steps": 2}}
    went_on, resumed = (make(rank, world, optim.AdamConfig(lr=0.1), levels, BySize) for _ in range(2))
    (small, large) = (share(joined(1, size), rank, world)[0] for size in (2 * world, 4 * world))
    went_on.train_step(*small)
    resumed.load_state_dict(went_on.state_dict())
    found = []
    for trainer in (went_on, resumed):
        trainer.train_step(*large)
        found.append(weights_of(trainer))
    return found


def branches(rank: int, world: int) -> list[dict[str, Any]]:
    """The weights where gradients are reduced in each step, and where only an update's are.

    In the first step one rank alone reaches the layer of a small batch, then both do, then none.
    """
    found = []
    small, large = (share(joined(4, size), rank, world) for size in (2 * world, 4 * world))
    for postpones in (False, True):
        levels = {
            "batch": {"gradient_accumulation_steps": 2},
            "distributed": {"allreduce_post_accumulation": postpones},
        }
        trainer = make(rank, world, optim.AdamConfig(lr=0.1), levels, BySize)
        train(trainer, [large[0] if rank else small[0], large[1], small[1], large[2], large[3], large[0]])
        found.append(weights_of(trainer))
    return found


# -- failures ------------------------------------------------------------------------------------------------------


def fails(rank: int, world: int) -> None:
    """The last rank raises after two steps."""
    trainer = make(rank, world, optim.SGDConfig(lr=0.1), {})
    for index, batch in enumerate(share(joined(6), rank, world)):
        if index == 2 and rank == world - 1:
            raise ValueError("this rank fails")
        trainer.train_step(*batch)


def disagrees(rank: int, world: int) -> str:
    """Options say something else than the group; gives the messages."""
    distributed.init_process_group("gloo")
    told = []
    for options in (
        {"world_size": world + 1, "world_rank": rank, "local_rank": rank},
        {"world_size": world, "world_rank": 1 - rank, "local_rank": rank},
        {"world_size": world, "world_rank": rank, "local_rank": rank + 1},
        {},
    ):
        trainer = ORTTrainer(Mlp(), DESC, optim.SGDConfig(), classify, make_options(distributed=options))
        try:
            trainer.train_step(*joined(1)[0])
        except ValueError as error:
            told.append(str(error))
    levels = {"batch": {"gradient_accumulation_steps": 2}, "distributed": {"allreduce_post_accumulation": True}}
    apart = make(rank, world, optim.SGDConfig(), levels)
    apart.train_step(*joined(1)[0])
    try:
        apart.state_dict()
    except NotImplementedError as error:
        told.append(str(error))
    return "\n".join(told)
