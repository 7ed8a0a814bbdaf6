"""The peak memory of training steps, with the compile and AdamW.

Each sample is a process of its own; its size right before the first step is subtracted. A model of one small layer
shows the fixed memory of a compile. aot_eager is shown too: it traces with AOTAutograd and generates no code.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.contestants import SUBJECT
from bench.peak_memory import TRIVIAL, PeakMemory
from bench.results import Rows
from bench.workloads import WORKLOADS, Size

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")

_ROUNDS = {"tiny": 1, "small": 3, "medium": 1}

_ROOT = Path(__file__).resolve().parent.parent

_MB = 1e6


@pytest.mark.parametrize("workload", [TRIVIAL, *WORKLOADS])
def test_peak_memory(
    workload: str, size: Size, backends: tuple[str, ...], rows: Rows, benchmark: Any, tmp_path: Path
) -> None:
    if size == "tiny" and workload not in (TRIVIAL, "gpt2"):
        pytest.skip("of the tiny models, only gpt2")
    contestants = (*backends, "aot_eager")
    found: list[dict[str, PeakMemory]] = []

    def once() -> None:
        folder = tmp_path / str(len(found))
        found.append({backend: _sample(folder / backend, workload, size, backend) for backend in contestants})

    benchmark.pedantic(once, rounds=_ROUNDS[size])
    cells = {f"{backend} MB": _median(found, backend, "peak") for backend in contestants}
    cells |= {f"{SUBJECT} later": _median(found, SUBJECT, "later"), f"{SUBJECT} left": _median(found, SUBJECT, "left")}
    benchmark.extra_info.update({"question": "peak memory", "case": workload, **cells})
    rows("peak memory", workload, cells)


def _sample(folder: Path, workload: str, size: str, backend: str) -> PeakMemory:
    """Measure a process that finds no cache."""
    environment = {**os.environ, "ORT_DYNAMO_CACHE": "0", "TORCHINDUCTOR_CACHE_DIR": str(folder)}
    command = [sys.executable, "-m", "bench.peak_memory", workload, size, backend]
    done = subprocess.run(command, env=environment, cwd=_ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return PeakMemory(**json.loads(done.stdout.splitlines()[-1]))


def _median(found: list[dict[str, PeakMemory]], backend: str, of: str) -> float | None:
    values = [getattr(one[backend], of) / _MB for one in found if backend in one]
    return statistics.median(values) if values else None
