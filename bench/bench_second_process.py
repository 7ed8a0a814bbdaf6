"""The time of the first step of a second process, relative to that of the first process.

Each sample is a process of its own. The first finds empty cache folders, the second those that the first has filled. A
further pair uses Dynamo's precompile, which is off by default (TORCH_CACHING_PRECOMPILE).
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.contestants import SUBJECT
from bench.first_step import FirstStep
from bench.results import Rows
from bench.workloads import WORKLOADS, Size

_ROUNDS = {"tiny": 1, "small": 2, "medium": 1}

_ROOT = Path(__file__).resolve().parent.parent

_COLUMNS = (
    "ort_train second/first",
    "of it Dynamo",
    "precompiled",
    "inductor second/first",
    "first ort_train/inductor",
    "second ort_train/inductor",
)


@pytest.mark.parametrize("workload", [*WORKLOADS, "gpt2-deep"])
def test_second_process(
    workload: str, size: Size, backends: tuple[str, ...], rows: Rows, benchmark: Any, tmp_path: Path
) -> None:
    name, _, deep = workload.partition("-")
    if size == "tiny" and workload not in ("mlp", "gpt2"):
        pytest.skip("of the tiny models, only mlp and gpt2")
    shape = deep or size
    found: list[dict[str, list[FirstStep]]] = []

    def once() -> None:
        here = tmp_path / str(len(found))
        samples = {}
        for backend in backends:
            if backend != "eager":
                samples[backend] = [_started(here, name, shape, backend) for _ in range(2)]
        samples["precompiled"] = [
            _started(here / "precompiled", name, shape, SUBJECT, TORCH_CACHING_PRECOMPILE="1") for _ in range(2)
        ]
        found.append(samples)

    benchmark.pedantic(once, rounds=_ROUNDS[size])
    cells = [_median(found, column) for column in (_later, _dynamo, _precompiled, _inductor, _firsts, _seconds)]
    benchmark.extra_info.update(
        {"question": "second process", "case": workload, **dict(zip(_COLUMNS, cells, strict=True))}
    )
    rows("second process", workload, dict(zip(_COLUMNS, cells, strict=True)))


def _started(folder: Path, name: str, size: str, backend: str, **variables: str) -> FirstStep:
    environment = {
        **os.environ,
        "ORT_DYNAMO_CACHE": "1",
        "ORT_DYNAMO_CACHE_DIR": str(folder / "ort_train"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / backend),
        **variables,
    }
    command = [sys.executable, "-m", "bench.first_step", name, size, backend]
    done = subprocess.run(command, env=environment, cwd=_ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return FirstStep(**json.loads(done.stdout.splitlines()[-1]))


_Samples = dict[str, list[FirstStep]]


def _median(found: list[_Samples], of: Callable[[_Samples], float | None]) -> float | None:
    values = [value for one in found if (value := of(one)) is not None]
    return statistics.median(values) if values else None


def _later(one: _Samples) -> float:
    first, second = one[SUBJECT]
    return second.first / first.first


def _dynamo(one: _Samples) -> float:
    first, second = one[SUBJECT]
    return second.dynamo / first.first


def _precompiled(one: _Samples) -> float:
    return one["precompiled"][1].first / one[SUBJECT][0].first


def _inductor(one: _Samples) -> float | None:
    return one["inductor"][1].first / one["inductor"][0].first if "inductor" in one else None


def _firsts(one: _Samples) -> float | None:
    return one[SUBJECT][0].first / one["inductor"][0].first if "inductor" in one else None


def _seconds(one: _Samples) -> float | None:
    return one[SUBJECT][1].first / one["inductor"][1].first if "inductor" in one else None
