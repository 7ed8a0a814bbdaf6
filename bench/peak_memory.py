"""A process that trains some steps and prints their peak memory.

python -m bench.peak_memory bert small ort_train
"""

from __future__ import annotations

import dataclasses
import gc
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers.modeling_utils  # noqa: F401  # in all samples alike: it imports modules that a compile needs
from torch import nn

from bench.contestants import TrainingStep
from bench.workloads import Workload, build

__all__ = ["TRIVIAL", "PeakMemory", "measure"]

TRIVIAL = "trivial"
"""A workload of one small linear layer: its memory is the fixed cost of a compile."""

_STEPS = 4


@dataclass(frozen=True)
class PeakMemory:
    """Bytes of a process's resident memory beyond those before torch.compile, when model and batch exist.

    Attributes:
        peak: the most at any time, compile included.
        later: the most from the second step on.
        left: the bytes after the last step, with gradients and the optimizer's state.
    """

    peak: int
    later: int
    left: int


def measure(workload: str, size: Any, backend: str) -> PeakMemory:
    """Train some steps of a workload in this process, which must not have compiled anything."""
    built = _trivial() if workload == TRIVIAL else build(workload, size)
    gc.collect()
    before = _resident("VmRSS")
    _forget_peak()
    step = TrainingStep(built, backend)
    step()
    first = _resident("VmHWM")
    _forget_peak()
    for _ in range(_STEPS - 1):
        step()
    later = _resident("VmHWM")
    return PeakMemory(max(first, later) - before, later - before, _resident("VmRSS") - before)


def _trivial() -> Workload:
    torch.manual_seed(0)
    return Workload(_MeanOfLinear(), (torch.randn(4, 4),))


class _MeanOfLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        mean: torch.Tensor = self.linear(rows).mean()
        return mean


def _resident(name: str) -> int:
    """VmRSS, the resident memory now, or VmHWM, the most since the last `_forget_peak`, in bytes."""
    found = re.search(rf"^{name}:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def _forget_peak() -> None:
    """Reset the peak to the memory that is resident now. getrusage's peak begins at the parent's, and stays."""
    Path("/proc/self/clear_refs").write_text("5")


if __name__ == "__main__":
    print(json.dumps(dataclasses.asdict(measure(*sys.argv[1:]))))
