"""The parts of `bench.device`: which cases each has, and how a case runs in its process.

The names of all cases are found in the main process, which runs none of them.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import random
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.cuda_checks import CHECKS
from bench.cuda_device import Place
from bench.cuda_models import Scale
from bench.device_models import TRAININGS, train

ROOT = Path(__file__).resolve().parent.parent
for folder in ("opinfo", "cuda"):
    if (path := str(ROOT / "tests" / folder)) not in sys.path:
        sys.path.append(path)

import operator_jobs  # noqa: E402
from kernel_facts import FACTS  # noqa: E402
from workers import ENDS_ITS_PROCESS, Case, Verdict, Worker  # noqa: E402

__all__ = ["LOGS", "PARTS", "Job", "Part", "Plan", "Worker", "cases_of", "prepare", "run_case"]

LOGS = "ORT_DYNAMO_DEVICE_LOGS"
"""The environment variable with the folder for the output of each process."""

DTYPES = ("float32", "bfloat16", "float16", "int64", "bool")
SAMPLES = 2
"""The number of samples of each operator and dtype."""

BAD = ("different", "failed", "crashed")
"""Kinds of an operator's samples that are wrong."""


@dataclass(frozen=True)
class Plan:
    """The settings of one run.

    Attributes:
        device: of all tensors.
        scale: of the models.
        units: the number of random units, each an operator in a dtype, from the operator database.
        seed: of that choice.
        only: a word that the names of cases contain; "" takes all.
    """

    device: str
    scale: Scale
    units: int = 800
    seed: int = 0
    only: str = ""

    @property
    def kind(self) -> str:
        return torch.device(self.device).type


@dataclass(frozen=True)
class Job:
    """One case of a part."""

    part: str
    name: str
    plan: Plan


@dataclass(frozen=True)
class Part:
    """A kind of case.

    Attributes:
        names: the names of its cases.
        run: runs the case of a name; "ok" is the verdict, None if there was nothing to judge, "reason" says more.
        until: the share of the time after which none of its cases begins.
    """

    names: Callable[[Plan], list[str]]
    run: Callable[[str, Plan], dict[str, Any]]
    until: float


# -- in the processes --------------------------------------------------------------------------------------------------


def prepare() -> None:
    """Set up a process: its output goes to a file, and float32 is computed without TF32."""
    if folder := os.environ.get(LOGS):
        file = os.open(Path(folder, f"{os.getpid()}.txt"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(file, stream)
    operator_jobs.prepare()
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.conv.fp32_precision = "ieee"


def cases_of(job: Job) -> Iterator[Case]:
    """The one case of a job."""
    yield partial(run_case, job)


def run_case(job: Job) -> Verdict:
    """Run a case. Gives "kind" (right, wrong, skipped), "detail", its findings and its duration."""
    begin = time.monotonic()
    try:
        found = PARTS[job.part].run(job.name, job.plan)
    except Exception as error:  # the cases after it are worth having
        found = {"ok": False, "reason": _said(error), "at": traceback.format_exc()}
    kind = {True: "right", False: "wrong", None: "skipped"}[found.pop("ok")]
    detail = found.pop("reason", None) or ("" if kind == "right" else _short(found))
    verdict: Verdict = {"kind": kind, "detail": detail, "found": found}
    try:
        if time.monotonic() - begin > 1:
            gc.collect()
        if job.plan.kind == "cuda":
            torch.cuda.synchronize(job.plan.device)
            torch.cuda.empty_cache()
    except Exception as error:  # after a fault on the device nothing works there any more
        verdict["kind"], verdict[ENDS_ITS_PROCESS] = "wrong", True
        verdict["detail"] = f"{detail}; after it: {_said(error)}".removeprefix("; ")
    return {**verdict, "took": round(time.monotonic() - begin, 1)}


def _said(error: Exception) -> str:
    return (f"{type(error).__name__}: {error}".splitlines() or [""])[0][:300]


def _short(found: dict[str, Any]) -> str:
    values = {name: f"{value:.3g}" if isinstance(value, float) else value for name, value in found.items()}
    return ", ".join(f"{name} {value}" for name, value in values.items())


def place_of(plan: Plan) -> Place:
    """The device of a plan, as the checks of `bench.cuda` take it."""
    return Place(torch.device(plan.device), plan.scale, float("inf"))


# -- the parts ---------------------------------------------------------------------------------------------------------


def run_doctor(name: str, plan: Plan) -> dict[str, Any]:
    """Have `python -m ort_dynamo doctor` look."""
    command = [sys.executable, "-m", "ort_dynamo", "doctor"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=_environment(), timeout=80)
    said = done.stdout + done.stderr
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return {"ok": done.returncode == 0, "reason": "" if done.returncode == 0 else " | ".join(lines[-3:]), "said": said}


def run_fact(name: str, plan: Plan) -> dict[str, Any]:
    """Find a fact of tests/cuda/kernel_facts.py."""
    fact = FACTS[name]
    found, expected = fact.find(plan.kind), fact.expected.get(plan.kind)
    return {
        "ok": fact.meets(plan.kind, found),
        "reason": f"expected {expected}, found {found}" if expected else "",
        "expected": expected,
        "found": found,
    }


def run_check(name: str, plan: Plan) -> dict[str, Any]:
    """Run a check of `bench.cuda`."""
    return CHECKS[name](place_of(plan))


def run_training(name: str, plan: Plan) -> dict[str, Any]:
    """Train a model of `bench.device_models`."""
    return train(name, place_of(plan))


_REWRITES = "ignore:Module already imported:pytest.PytestAssertRewriteWarning"
"""The second run of pytest in a process finds its plugins' modules."""


class _Reports:
    """A pytest plugin that records the outcome of one test."""

    def __init__(self) -> None:
        self.outcome, self.reason = "", ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed or report.skipped:
            self.outcome = report.outcome
            said = report.longrepr
            text = str(said[2]) if isinstance(said, tuple) else report.longreprtext
            errors = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
            self.reason = (errors or text.strip().splitlines()[-1:] or [""])[0][:300]
        elif report.when == "call":
            self.outcome = self.outcome or report.outcome


def run_test(name: str, plan: Plan) -> dict[str, Any]:
    """Run a test that is marked `cuda`."""
    import pytest

    reports, said = _Reports(), io.StringIO()
    before = os.getcwd()
    os.chdir(ROOT)
    try:
        with contextlib.redirect_stdout(said):
            pytest.main(["-q", "-p", "no:cacheprovider", "-W", _REWRITES, name], plugins=[reports])
    finally:
        os.chdir(before)
    if reports.outcome == "skipped":
        return {"ok": None, "reason": reports.reason}
    if reports.outcome == "passed":
        return {"ok": True}
    return {"ok": False, "reason": reports.reason or "it did not run", "said": said.getvalue()[-4000:]}


def run_unit(name: str, plan: Plan) -> dict[str, Any]:
    """Run samples of an operator in a dtype, beside eager."""
    operator, dtype = name.split()
    job = operator_jobs.Job(operator, dtype, SAMPLES, dynamic=False, in_place=False, device=plan.device)
    verdicts = [case() for case in operator_jobs.cases_of(job)]
    kinds = [one["kind"] for one in verdicts]
    said = {"kinds": kinds, "eager": sorted({text for one in verdicts for text in one["eager"]})}
    bad = [one for one in verdicts if one["kind"] in BAD]
    if not bad and any(not kind.startswith("not ") for kind in kinds):
        return {"ok": True, **said}
    reasons = [f"{one['kind']}: {one['detail']}" for one in bad or verdicts]
    return {"ok": False if bad else None, "reason": (reasons or ["it has no samples"])[0], **said}


def tests_marked(plan: Plan) -> list[str]:
    """The node ids of the tests marked `cuda`, without those that another part runs."""
    files = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.cuda" in path.read_text()]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "cuda", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *map(str, files)], cwd=ROOT, capture_output=True, text=True, env=_environment(), timeout=120
    )
    found = [line for line in done.stdout.splitlines() if "::" in line and line.startswith("tests/")]
    if not found:
        raise RuntimeError(f"pytest finds no test: {(done.stdout + done.stderr).strip()[-300:]}")
    others = ("::test_a_fact_holds_on_cuda", "::test_a_check_of_the_benchmark_passes")
    return [name for name in found if not any(other in name for other in others)]


def _environment() -> dict[str, str]:
    """The environment of a Python with the import paths of this one."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}


def units(plan: Plan) -> list[str]:
    """A fixed sample of operators in dtypes, in the order in which they run."""
    from opinfo_samples import DTYPES as BY_NAME
    from opinfo_samples import operators

    every = [
        f"{name} {dtype}"
        for name, op in sorted(operators().items())
        if not name.startswith("jiterator")  # torch compiles these for a device
        for dtype in DTYPES
        if BY_NAME[dtype] in op.supported_dtypes(plan.kind)
    ]
    return random.Random(plan.seed).sample(every, min(plan.units, len(every)))


PARTS: dict[str, Part] = {
    "doctor": Part(lambda plan: ["doctor"], run_doctor, 0.3),
    "facts": Part(lambda plan: list(FACTS), run_fact, 0.4),
    "checks": Part(lambda plan: list(CHECKS), run_check, 0.6),
    "tests": Part(tests_marked, run_test, 0.75),
    "models": Part(lambda plan: list(TRAININGS), run_training, 0.85),
    "operators": Part(units, run_unit, 0.95),
}
"""Name -> part, in the order in which their cases begin."""
