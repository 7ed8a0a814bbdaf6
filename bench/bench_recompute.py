"""Cost and gain of recomputation: bytes of saved tensors, and time of a step in units of eager's.

The contestants are torch.utils.checkpoint around each layer, and inductor with its activation memory budget. Bytes are
those of the tensors that autograd saves, each allocation once, without parameters, buffers and batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from torch import nn
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch.utils.checkpoint import checkpoint

from bench.contestants import SUBJECT, TrainingStep
from bench.interleaved import run_interleaved
from bench.workloads import DEEP, Workload, build
from ort_dynamo.testing import saved_for_backward

_ROUNDS = 8


@dataclass(frozen=True)
class _Way:
    """A way to train: a backend and its memory options."""

    backend: str
    options: dict[str, Any] | None = None
    checkpointed: bool = False
    budget: float = 1.0

    def step(self, name: str) -> TrainingStep:
        workload = build(name, "deep")
        if self.checkpointed:
            _checkpoint_layers(workload.module)
        step = TrainingStep(workload, self.backend, self.options)
        with functorch_config.patch(activation_memory_budget=self.budget):
            step()  # compiles
        return step


def _default_of(option: str) -> dict[str, Any]:
    """An option that changes nothing but makes torch.compile see another backend: modules of one class share code."""
    return {option: getattr(inductor_config, option)}


_WAYS = {
    "eager": _Way("eager"),
    "eager, checkpoints": _Way("eager", checkpointed=True),
    "inductor": _Way("inductor"),
    "inductor, budget 0.5": _Way("inductor", _default_of("max_fusion_size"), budget=0.5),
    "inductor, budget 0.2": _Way("inductor", _default_of("unroll_reductions_threshold"), budget=0.2),
    SUBJECT: _Way(SUBJECT),
    "ort_train, layers": _Way(SUBJECT, {"recompute_plan": "layers"}),
    "ort_train, budget 0.5": _Way(SUBJECT, {"memory_budget": 0.5}),
    "ort_train, budget 0.2": _Way(SUBJECT, {"memory_budget": 0.2}),
}


def _checkpoint_layers(module: nn.Module) -> None:
    """Checkpoint each layer of a transformer, each stage of a ResNet."""
    for layers in module.modules():
        if isinstance(layers, nn.ModuleList) and len(layers) > 2:
            for layer in layers:
                layer.forward = _checkpointed(layer.forward)


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)


def _saved_bytes(step: TrainingStep, workload: Workload) -> int:
    """Bytes that autograd holds between forward and backward."""
    module = workload.module
    with saved_for_backward(*module.parameters(), *module.buffers(), *workload.batch) as kept:
        loss = step.loss()
    found = sum(kept.values())
    del loss
    return found


@pytest.mark.parametrize("workload", DEEP)
def test_recompute(
    workload: str, backends: tuple[str, ...], benchmark: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    ways = {name: way for name, way in _WAYS.items() if way.backend in backends}
    steps = {name: way.step(workload) for name, way in ways.items()}
    kept = {name: _saved_bytes(step, step.workload) for name, step in steps.items()}
    timings = run_interleaved(benchmark, steps, SUBJECT, _ROUNDS)
    rows = []
    for name in steps:
        ratio = timings.ratio(name, "eager", "cpu")
        rows.append({"way": name, "bytes": kept[name], "time": 1.0 if ratio is None else ratio.median})
    benchmark.extra_info.update(question="recompute", case=workload, rows=rows)
    with capsys.disabled():
        print(f"\n{workload}: MB kept for the backward, share of eager's, time of a step in eager's (processor time)")
        for row in rows:
            share = row["bytes"] / kept["eager"]
            print(f"  {row['way']:24}{row['bytes'] / 1e6:10.1f}{share:8.0%}{row['time']:8.2f}")
