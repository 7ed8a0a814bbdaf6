"""What ranks do that have stages of a model: neighbours have the same share of a batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from replicated import Normed, joined, make, share, train
from small_trainers import Mlp
from torch import Tensor

from ort_dynamo import optim

__all__ = ["CASES", "cases", "others"]

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


class LateInput(Mlp):
    """Uses its input in each stage."""

    def forward(self, input1: Tensor) -> Tensor:
        return super().forward(input1) + input1.sum(1, keepdim=True)


class Branching(Mlp):
    """Has a branch that no tracer can follow."""

    def forward(self, input1: Tensor) -> Tensor:
        return super().forward(-input1 if float(input1.sum()) > 0 else input1)


def others(rank: int, world: int) -> dict[str, Any]:
    whole = {"pipeline_parallel": {**_PIPELINE, "num_pipeline_micro_batches": 1}}
    found: dict[str, Any] = {}
    odd = {"pipeline_parallel": {**_PIPELINE, "num_pipeline_micro_batches": 3}}
    for name, model, levels in (
        ("normed", Normed, whole),
        ("late", LateInput, whole),
        ("branching", Branching, whole),
        ("odd", Mlp, odd),
    ):
        try:
            make(rank, world, optim.SGDConfig(), {"distributed": levels}, model).train_step(*joined(1)[0])
        except NotImplementedError as error:
            found[name] = str(error)
    return found
