"""Run the same work many times and report what stays: memory, objects, tensors and sessions.

    python tests/faults/leaks.py                        # all of it, about an hour on one core
    python tests/faults/leaks.py steps --count 1000
    python tests/faults/leaks.py compiles --beside aot_eager

Each kind of work runs in a process of its own and is measured at 20 points. It is flat if no figure grows by more than
1 % from the middle to the end. torch.compile itself keeps some objects of each compile: `--beside` runs the same loop
with a backend of torch's as well, and what that one gains does not count. The exit status is 1 if a figure is not flat.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FunctionType, MethodType

import torch
from torch import nn
from torch.nn import functional as F

from ort_dynamo.training.ortmodule import DebugOptions, LogLevel, ORTModule

POINTS = 20
ALLOWED = 0.01
"""Growth of a figure from the middle to the end, as a part of it."""

FIGURES = ("resident", "objects", "tensors", "sessions")


@dataclass(frozen=True)
class Sample:
    """The things that a process holds.

    Attributes:
        resident: bytes of resident memory; 0 where the system does not tell.
        objects: objects that Python's collector tracks.
        tensors, sessions: those among them that are tensors, and ONNX Runtime's sessions.
        types: type name -> objects.
    """

    resident: int
    objects: int
    tensors: int
    sessions: int
    types: dict[str, int] = field(default_factory=dict)


def sample() -> Sample:
    """Collect garbage and count the rest."""
    for _ in range(2):  # callbacks of weak references free more
        gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)  # memory that is free and not given back is no leak
    kinds = Counter(map(type, gc.get_objects()))
    types: Counter[str] = Counter()
    for kind, number in kinds.items():
        types[f"{kind.__module__}.{kind.__qualname__}"] += number
    tensors = sum(number for kind, number in kinds.items() if issubclass(kind, torch.Tensor))
    sessions = sum(number for name, number in types.items() if name.endswith(".InferenceSession"))
    return Sample(_resident(), kinds.total(), tensors, sessions, dict(types))


def _resident() -> int:
    status = Path("/proc/self/status")
    if not status.exists():
        return 0
    (line,) = [line for line in status.read_text().splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) * 1024


# -- the work ----------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A small model with what keeps state: a mask, statistics, saved tensors, and a view that is returned."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(32, width), nn.BatchNorm1d(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.norm(self.embed(tokens))
        hidden = hidden + F.dropout(self.down(F.gelu(self.up(hidden))), 0.1, self.training)
        return hidden, hidden[:, :2]


class Cell(nn.Module):
    """A model that compiles fast."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.linear(x).tanh(), 0.1, self.training)


def train(model: Callable[[torch.Tensor], torch.Tensor], width: int = 8) -> None:
    """Run forward and backward of a cell once."""
    model(torch.ones(3, width)).square().mean().backward()


def steps(backend: str) -> Iterator[None]:
    """Train one model, with a batch size that changes, and run it without gradients between."""
    model = Block()
    compiled = torch.compile(model, backend=backend, dynamic=True)
    optimizer = torch.optim.Adam(model.parameters(), fused=False, foreach=False)
    number = 0
    while True:
        hidden, view = compiled(torch.arange(4 + number % 5))
        (hidden.square().mean() + view.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if number % 4 == 0:
            with torch.no_grad():
                compiled(torch.arange(5))
        number += 1
        yield


def compiles(backend: str) -> Iterator[None]:
    """Compile a new model, train one step, drop it, and forget all that was compiled."""
    number = 0
    while True:
        torch._dynamo.reset()
        width = 8 + number % 3
        train(torch.compile(Cell(width), backend=backend), width)
        number += 1
        yield


def drops(backend: str) -> Iterator[None]:
    """Compile a new function, train one step and drop it; the sessions stay for the next one."""
    number = 0
    while True:
        width = 8 + number % 3
        cell = Cell(width)
        forward = FunctionType(Cell.forward.__code__.replace(co_name=f"forward_{number % 2}"), globals())
        train(torch.compile(MethodType(forward, cell), backend=backend), width)
        number += 1
        yield


def wraps(backend: str) -> Iterator[None]:
    """Wrap a new model by ORTModule, train one step, and drop it. Another backend compiles the model."""
    quiet = DebugOptions(log_level=LogLevel.ERROR)
    while True:
        torch._dynamo.reset()
        model = Cell()
        train(ORTModule(model, quiet) if backend == "ort_train" else torch.compile(model, backend=backend))
        yield


WORK: dict[str, tuple[Callable[[str], Iterator[None]], int]] = {
    "steps": (steps, 10_000),
    "compiles": (compiles, 1_000),
    "drops": (drops, 1_000),
    "wraps": (wraps, 1_000),
}
"""Name -> the work, and how often it runs."""


# -- measuring ---------------------------------------------------------------------------------------------------------


def measure(work: Iterator[None], count: int, points: int = POINTS) -> list[Sample]:
    """Run some work `count` times, with `points` samples at equal distances."""
    found = []
    for number in range(1, count + 1):
        next(work)
        if number * points // count > (number - 1) * points // count:
            one = sample()
            # Only two samples are compared by type; the counts of the others would grow with their number.
            found.append(one if len(found) + 1 in (points // 2, points) else replace(one, types={}))
    return found


def grown(samples: Sequence[Sample]) -> dict[str, int]:
    """Give the growth of each figure from the middle to the end."""
    middle, end = samples[len(samples) // 2 - 1], samples[-1]
    return {name: getattr(end, name) - getattr(middle, name) for name in FIGURES}


def grown_types(samples: Sequence[Sample]) -> Counter[str]:
    """Give type name -> objects at the end that were not there in the middle."""
    return Counter(samples[-1].types) - Counter(samples[len(samples) // 2 - 1].types)


def excess(samples: Sequence[Sample], beside: Sequence[Sample] = ()) -> dict[str, float]:
    """Give the growth of each figure, less that of `beside`, as a part of its value in the middle."""
    middle, own = samples[len(samples) // 2 - 1], grown(samples)
    theirs = grown(beside) if beside else dict.fromkeys(FIGURES, 0)
    return {name: (own[name] - max(theirs[name], 0)) / max(getattr(middle, name), 1) for name in FIGURES}


def run_alone(name: str, backend: str, count: int) -> list[Sample]:
    """Measure some work in a process of its own."""
    command = [sys.executable, __file__, name, "--backend", backend, "--count", str(count), "--child"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return [Sample(**one) for one in json.loads(done.stdout.splitlines()[-1])]


def show(name: str, backend: str, count: int, samples: Sequence[Sample]) -> None:
    """Print all samples, and the types of which there are more at the end than in the middle."""
    print(f"\n{name}: {count} times with backend={backend!r}")
    print(f"{'done':>8} {'RSS MiB':>9} {'objects':>9} {'tensors':>8} {'sessions':>8}")
    for number, one in enumerate(samples, 1):
        done = count * number // len(samples)
        print(f"{done:8} {one.resident / 2**20:9.1f} {one.objects:9} {one.tensors:8} {one.sessions:8}")
    more = grown_types(samples).most_common(6)
    print("more objects in the second half: " + (", ".join(f"{key} {value}" for key, value in more) or "none"))


def main() -> int:
    """Run the work that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", nargs="*", help=f"of {', '.join(WORK)}; default: all")
    parser.add_argument("--count", type=int, help="how often each runs")
    parser.add_argument("--backend", default="ort_train")
    parser.add_argument("--beside", help="another backend, whose growth does not count")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if unknown := {*given.work} - {*WORK}:
        parser.error(f"no such work: {', '.join(sorted(unknown))}")
    if given.child:
        torch.set_num_threads(1)
        samples = measure(WORK[given.work[0]][0](given.backend), given.count)
        print(json.dumps([asdict(one) for one in samples]))
        return 0
    flat = True
    for name in given.work or WORK:
        count = given.count or WORK[name][1]
        samples = run_alone(name, given.backend, count)
        show(name, given.backend, count, samples)
        beside = run_alone(name, given.beside, count) if given.beside else []
        if beside:
            show(name, given.beside, count, beside)
        parts = excess(samples, beside)
        flat &= all(part <= ALLOWED for part in parts.values())
        less = f", less that of {given.beside}" if given.beside else ""
        print(f"growth{less}: " + ", ".join(f"{key} {part:+.2%}" for key, part in parts.items()), flush=True)
    return 0 if flat else 1


if __name__ == "__main__":
    sys.exit(main())
