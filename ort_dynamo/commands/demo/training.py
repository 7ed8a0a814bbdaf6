"""Trains one model in eager and in ort_train, step by step in turn."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ort_dynamo.torch_internals.tracing.dynamo import counters

__all__ = ["Outcome", "Task", "Trace", "train_side_by_side"]


@dataclass(frozen=True)
class Task:
    """A training task.

    Attributes:
        name: a short name.
        model: a module that returns the loss for (inputs, targets), and logits for inputs alone.
        batches: (inputs, targets) without end.
        learning_rate: the learning rate of AdamW.
        test: inputs and class labels for the test accuracy, if there is one.
    """

    name: str
    model: nn.Module
    batches: Iterator[tuple[Tensor, Tensor]]
    learning_rate: float
    test: tuple[Tensor, Tensor] | None = None


@dataclass
class Trace:
    """One training.

    Attributes:
        losses: the loss of every step.
        seconds: the time of every step with the optimizer; the first one includes the compilation.
        accuracy: the accuracy on the test set after the last step, in eval mode; None without a test set.
    """

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    accuracy: float | None = None


@dataclass(frozen=True)
class Outcome:
    """Both trainings, and where the compiled one ran.

    Attributes:
        eager, ort: the two trainings.
        counts: the backend's counters: graphs, islands, native_nodes, by_design_nodes, chosen_nodes, eager_nodes.
        reasons: why nodes stayed in eager -> how many.
    """

    eager: Trace
    ort: Trace
    counts: Mapping[str, int]
    reasons: Mapping[str, int]


def train_side_by_side(
    task: Task, steps: int, seed: int, options: Mapping[str, Any], progress: Callable[[Trace, Trace], None]
) -> Outcome:
    """Train two copies of `task.model` on the same batches with the same random numbers.

    The two alternate their steps and take turns in going first, so a busy machine slows both equally.

    Args:
        task: the model and its data.
        steps: the number of steps, 1 or more.
        seed: the seed of torch's generator, set before every step of either.
        options: the options of torch.compile.
        progress: called with both traces after every step.
    """
    torch.compiler.reset()
    counters.clear()
    eager = _Trainee(copy.deepcopy(task.model), task.learning_rate)
    ort = _Trainee(copy.deepcopy(task.model), task.learning_rate, options)
    for step in range(steps):
        batch = next(task.batches)
        for trainee in (eager, ort) if step % 2 == 0 else (ort, eager):
            torch.manual_seed(seed + step)  # both get the same dropout
            trainee.step(*batch)
        progress(eager.trace, ort.trace)
    if task.test is not None:
        eager.test(*task.test)
        ort.test(*task.test)
    counts = {**counters["ort_train"], "by_design_nodes": counters["ort_train_by_design"].total()}
    return Outcome(eager.trace, ort.trace, counts, dict(counters["ort_train_eager"]))


class _Trainee:
    """A model with its optimizer, compiled if there are options, and its trace."""

    def __init__(self, model: nn.Module, learning_rate: float, options: Mapping[str, Any] | None = None) -> None:
        self._model = model
        self._call: Callable[..., Any] = model
        if options is not None:
            self._call = torch.compile(model, backend="ort_train", fullgraph=True, options=dict(options))
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
        self.trace = Trace()

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        self._model.train()
        began = time.perf_counter()
        self._optimizer.zero_grad()
        loss = self._call(inputs, targets)
        loss.backward()
        self._optimizer.step()
        self.trace.losses.append(loss.item())
        self.trace.seconds.append(time.perf_counter() - began)

    def test(self, inputs: Tensor, labels: Tensor) -> None:
        self._model.eval()
        with torch.no_grad():
            right = self._call(inputs).argmax(dim=-1) == labels
        self.trace.accuracy = right.double().mean().item()
