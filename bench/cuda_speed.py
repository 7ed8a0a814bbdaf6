"""Time and memory of a training step on a device, beside those of eager and inductor."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from bench.contestants import compile_with
from bench.cuda_checks import Found
from bench.cuda_device import Place
from bench.cuda_models import LARGE, SMALL, build_model
from bench.interleaved import Spread
from bench.workloads import Workload

__all__ = ["SPEEDS", "interleaved", "measure", "product_rate"]


class _Step:
    """A training step in bfloat16 autocast; the module and its optimizer are shared by all contestants."""

    def __init__(self, place: Place, loss: Callable[..., Tensor], workload: Workload, optimizer: Any) -> None:
        self.place, self.loss, self.workload, self.optimizer = place, loss, workload, optimizer

    def __call__(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        with self.place.autocast(torch.bfloat16):
            loss = self.loss(*self.workload.batch)
        loss.backward()
        self.optimizer.step()


def _recorded(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, backend="ort_train", mode="reduce-overhead", fullgraph=True, dynamic=False)


CONTESTANTS: Mapping[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    **{name: partial(compile_with, name) for name in ("eager", "inductor", "ort_train")},
    "ort_train, recorded": _recorded,
}


def interleaved(
    steps: Mapping[str, Callable[[], object]], clock: Callable[[Callable[[], object]], float], rounds: int
) -> dict[str, list[float]]:
    """Name -> its seconds, one a round; the order goes through all permutations."""
    samples: dict[str, list[float]] = {name: [] for name in steps}
    for order in itertools.islice(itertools.cycle(itertools.permutations(steps)), rounds):
        for name in order:
            samples[name].append(clock(steps[name]))
    return samples


def product_rate(place: Place) -> float:
    """Floating-point operations a second of one large bfloat16 matmul: the device's peak in practice."""
    size = 8192 if place.on_cuda else 256
    left, right = (torch.randn(size, size, device=place.device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(left)
    run = partial(torch.mm, left, right, out=out)
    place.seconds(run, 5)
    return 2 * size**3 / min(place.seconds(run, 10) for _ in range(3))


def measure(place: Place, name: str) -> Found:
    """Ratios, seconds and memory of a model's training step; a contestant that fails is named with its reason."""
    torch._dynamo.reset()
    workload = build_model(name, place.scale, place.device)
    optimizer = torch.optim.AdamW(workload.module.parameters(), lr=1e-4, fused=place.on_cuda or None)
    steps: dict[str, Callable[[], object]] = {}
    peaks: dict[str, int | None] = {}
    absent: dict[str, str] = {}
    for contestant, compiled in CONTESTANTS.items():
        step = _Step(place, compiled(workload.module), workload, optimizer)
        if steps and time.monotonic() >= place.end:
            absent[contestant] = "the time was over"
            continue
        try:
            for _ in range(4):  # compile, warm up, record, replay
                step()
            peaks[contestant] = place.peak(step)
        except Exception as error:  # the others are measured, and the part does not count as passed
            absent[contestant] = f"{type(error).__name__}: {error}"[:2000]
            place.clean()
            continue
        steps[contestant] = step
    with FlopCounterMode(display=False) as counter:
        _Step(place, workload.module, workload, optimizer)()
    calls, rounds = (3, 12) if place.on_cuda else (1, 2)
    samples = interleaved(steps, lambda step: place.seconds(step, calls), rounds)
    rate = product_rate(place)
    medians = {one: Spread.of(seconds).median for one, seconds in samples.items()}
    ratios = {
        f"{above}/{below}": dataclasses.asdict(
            Spread.of([a / b for a, b in zip(samples[above], samples[below], strict=True)])
        )
        for above, below in itertools.permutations(samples, 2)
        if below in ("eager", "inductor")
    }
    return {
        "ratios": ratios,
        "seconds": medians,
        "peaks": peaks,
        "share of the product rate": {
            one: counter.get_total_flops() / seconds / rate for one, seconds in medians.items()
        },
        "product rate": rate,
        "absent": absent,
        "ok": not absent,
    }


SPEEDS: dict[str, Callable[[Place], Found]] = {
    f"step of {name}": partial(measure, name=name)
    for name in (*LARGE, *SMALL)
    if name not in ("mobilenet", "unet", "convnext")
}
"""name -> measurement, in their order; the small ones show the cost of a call."""
