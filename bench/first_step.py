"""A process that trains two steps and says how long they took: `python -m bench.first_step gpt2 deep ort_train`."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo.utils import compilation_time_metrics

from bench.contestants import TrainingStep
from bench.workloads import build

__all__ = ["FirstStep", "measure"]


@dataclass(frozen=True)
class FirstStep:
    """Seconds of a process.

    Attributes:
        first: from torch.compile to the end of the first step; imports of torch and of the model are before.
        dynamo: the part of these that Dynamo took, without the backend.
        second: the second step.
    """

    first: float
    dynamo: float
    second: float


def measure(workload: str, size: Any, backend: str) -> FirstStep:
    """Train two steps of a workload in this process, which must not have compiled anything."""
    built = build(workload, size)
    begin = time.perf_counter()
    step = TrainingStep(built, backend)
    step()
    first = time.perf_counter()
    step()
    second = time.perf_counter()
    if torch._dynamo.config.caching_precompile:
        torch.compiler.save_cache_artifacts()  # which torch does not do by itself
    spent = {name: sum(times) for name, times in compilation_time_metrics.items()}
    dynamo = spent.get("_compile.compile_inner", 0.0) - spent.get("OutputGraph.call_user_compiler", 0.0)
    return FirstStep(first - begin, dynamo, second - first)


if __name__ == "__main__":
    print(json.dumps(dataclasses.asdict(measure(*sys.argv[1:]))))
