"""Training of the small models for `bench.device`: three steps under ort_train, beside eager's from the same seeds."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from bench.cuda_device import Place
from bench.cuda_models import SMALL, build_model
from bench.workloads import Workload

__all__ = ["TRAININGS", "Training", "train"]

STEPS = 3
LANGUAGE_MODELS = ("gpt", "bert")


@dataclass(frozen=True)
class Training:
    """The way a model trains.

    Attributes:
        checkpoints: recompute the layers of a language model or perceptron in the backward.
        drops: with dropout.
        parts: batches whose gradients are summed before a step.
        varies: each batch has other sizes: the length of text, else the number of rows.
        dtype: of autocast.
    """

    checkpoints: bool = False
    drops: bool = False
    parts: int = 1
    varies: bool = False
    dtype: torch.dtype | None = None


_WAYS = {
    "plain": Training(),
    "checkpointing": Training(checkpoints=True),
    "dropout": Training(drops=True),
    "checkpointing, dropout": Training(checkpoints=True, drops=True),
    "accumulation": Training(parts=2),
    "varying lengths": Training(varies=True),
    "bfloat16": Training(dtype=torch.bfloat16),
}


def _suits(model: str, way: Training) -> bool:
    has_layers = model == "mlp" or model in LANGUAGE_MODELS
    return has_layers or not (way.checkpoints or way.drops)


TRAININGS: dict[str, tuple[str, Training]] = {
    f"{model}, {name}": (model, way) for name, way in _WAYS.items() for model in SMALL if _suits(model, way)
}
"""name -> model of SMALL, and how it trains."""

_ROOM = {None: (4.0, 1e-3), torch.bfloat16: (2.0, 1e-3)}
"""dtype of autocast -> largest ratio of our distance from float64 to eager's, and a distance that always passes."""


class _Checkpointed(nn.Module):
    """A module that is recomputed in the backward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return found


def build(model: str, way: Training, place: Place) -> Workload:
    """A model as it trains, with its batch."""
    workload = build_model(model, place.scale, place.device, dropout=way.drops)
    for module in workload.module.modules():
        if way.drops and isinstance(module, nn.Dropout):
            module.p = 0.2
    if way.checkpoints:
        layers: Any = workload.module.layers
        for index, layer in enumerate(layers):
            layers[index] = _Checkpointed(layer)
    return workload


def batches(model: str, way: Training, batch: tuple[Tensor, ...]) -> Iterator[list[tuple[Tensor, ...]]]:
    """For each step the batches whose gradients it sums."""
    for step in range(STEPS):
        one = tuple(tensor.roll(step, 0) for tensor in batch)
        if way.varies and model in LANGUAGE_MODELS:
            one = tuple(tensor[:, : tensor.shape[1] - step] for tensor in one)
        elif way.varies:
            one = tuple(torch.cat([tensor, tensor[:step]]) for tensor in one)
        yield [tuple(half) for half in zip(*(tensor.chunk(way.parts) for tensor in one), strict=True)]


def train(name: str, place: Place) -> dict[str, Any]:
    """Train a model of TRAININGS in eager and under ort_train, and say how far apart they are.

    Both are measured by eager in float64, except with dropout, whose random numbers differ there: ours is measured by
    eager itself then. Where aot_eager, which is torch's own tracing, is as far as ours, that is no fault of ours.
    """
    model, way = TRAININGS[name]
    torch._dynamo.reset()
    counters.clear()
    workload = build(model, way, place)
    steps = list(batches(model, way, workload.batch))

    def run(backend: str) -> list[Tensor]:
        return _numbers(workload.module, steps, way, place, backend)

    ours, eager = run("ort_train"), run("eager")
    counts = dict(counters["ort_train"])
    exact = eager if way.drops else _exact(workload.module, steps, way, place)
    apart = {"ours": distance(ours, exact), "eager": distance(eager, exact)}
    times, anyhow = _ROOM[way.dtype]
    limit = max(times * apart["eager"], anyhow)
    if not apart["ours"] <= limit:
        torch._dynamo.reset()
        apart["aot_eager"] = distance(run("aot_eager"), exact)
        limit = max(limit, apart["aot_eager"])
    nodes = {where: counts.get(f"{where}_nodes", 0) for where in ("native", "chosen", "eager")}
    return {**apart, "nodes": nodes, "ok": apart["ours"] <= limit and nodes["native"] + nodes["chosen"] > 0}


def _numbers(
    module: nn.Module, steps: Iterable[Iterable[tuple[Tensor, ...]]], way: Training, place: Place, backend: str
) -> list[Tensor]:
    """Losses and gradients of all steps of a copy of a module, and its state after them."""
    module = copy.deepcopy(module)
    call: Callable[..., Tensor] = module if backend == "eager" else torch.compile(module, backend=backend)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
    numbers: list[Tensor] = []
    for index, parts in enumerate(steps):
        optimizer.zero_grad()
        for part in parts:
            torch.manual_seed(index)
            with place.autocast(way.dtype):
                loss = call(*part)
            loss.backward()
            numbers.append(loss.detach())
        numbers += [p.grad.clone() for p in module.parameters() if p.grad is not None]
        optimizer.step()
    return [*numbers, *(value.detach().clone() for value in module.state_dict().values())]


def _exact(
    module: nn.Module, steps: Iterable[Iterable[tuple[Tensor, ...]]], way: Training, place: Place
) -> list[Tensor]:
    double = [
        [tuple(tensor.double() if tensor.is_floating_point() else tensor for tensor in part) for part in parts]
        for parts in steps
    ]
    wide = dataclasses.replace(way, dtype=None)
    return _numbers(copy.deepcopy(module).double(), double, wide, place, "eager")


def distance(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> float:
    """The largest distance of two tensors of a pair, relative to the norm of all of the same number of entries.

    Gradients that are zero but for rounding have no norm of their own to compare with, so a tensor counts by the
    larger of its own norm and a thousandth of the largest of all.
    """
    pairs = [(one.double(), other.double()) for one, other in zip(ours, theirs, strict=True)]
    largest = max(float(other.norm()) for _, other in pairs)
    far = 0.0
    for one, other in pairs:
        if not bool((one.isfinite() == other.isfinite()).all()):
            return float("inf")
        far = max(far, float((one - other).nan_to_num().norm()) / max(float(other.norm()), largest * 1e-3, 1e-300))
    return far
