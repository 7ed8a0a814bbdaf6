"""Compares a compiled program with eager, by a float64 run that tells rounding from a fault."""

from __future__ import annotations

import math
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch._functorch.config
from program_rounding import Rounded
from program_run import Compile, Observed, Raised, observe
from program_text import Program
from torch import Tensor
from torch._dynamo import guards

from ort_dynamo.cache.disk import COUNTS
from ort_dynamo.testing import patch_facts

__all__ = ["MODES", "SETTINGS", "Baseline", "Case", "Difference", "baseline", "check", "differences", "has_in"]

MODES = ("inference", "training", "dynamic")
BATCHES = {"inference": (2, 2), "training": (2, 2), "dynamic": (3, 2)}

SETTINGS: dict[str, Mapping[str, Any]] = {
    "default": {},
    "onnxruntime": {"placement": "onnxruntime"},
    "budget": {"memory_budget": 0.5},
    "sections": {"placement": "onnxruntime", "backward_sections": 6},
    "stored": {"placement": "onnxruntime"},
    "traced": {"placement": "onnxruntime", "debug": {"trace_cache": True}},
}
"""Name -> options of torch.compile.

"sections" also lowers the sizes from which a target cuts and recomputes. "stored" compiles again, from the cache on
disk, and "traced" also from torch's.
"""


@dataclass(frozen=True)
class Noise:
    """The tolerances, relative to the largest number of a tensor, or to `LEAST` of the largest of its kind.

    Attributes:
        floor: a rounding error that is always allowed.
        times: the maximum ratio of an error to eager's own, or to the floor.
        shaken: the noise on inputs and parameters that measures a program's sensitivity.
        rounded: the noise on the results of all operators: half of a unit in the last place.
        most: a program with a larger limit is not compared: it would hide faults.
    """

    floor: float
    times: float
    shaken: float
    rounded: float
    most: float


NOISE = {
    "float64": Noise(1e-14, 20, 1e-14, 2**-53, 1e-9),
    "float32": Noise(1e-6, 20, 1e-6, 2**-24, 7e-4),
    "float16": Noise(2**-11, 5, 2**-12, 2**-12, 0.1),
    "bfloat16": Noise(2**-8, 5, 2**-9, 2**-9, 0.3),
}
"""Tolerances of a program, by the least precise dtype that it computes in."""

_ROUNDED_RUNS = 3

_ZEROS = "zeros for no gradient"

LEAST = 0.1
"""A gradient that is zero in exact arithmetic has rounding errors of the size of the others'."""


@dataclass(frozen=True)
class Case:
    """A program, and how it is run.

    Attributes:
        mode: one of `MODES`.
        setting: a key of `SETTINGS`.
        batches: the batch size of each call; by default those of the mode.
    """

    program: Program
    mode: str
    setting: str = "default"
    batches: tuple[int, ...] = ()

    def observe(self, **given: Any) -> Observed:
        batches = self.batches or BATCHES[self.mode]
        return observe(self.program, batches, gradients=self.mode != "inference", **given)

    def text(self) -> str:
        batches = " ".join(str(batch) for batch in self.batches or BATCHES[self.mode])
        header = f"# mode {self.mode}, setting {self.setting}, batches {batches}, dtype {self.program.dtype}"
        return f"{header}\n{self.program.source()}"


@dataclass(frozen=True)
class Difference:
    """One difference: its kind (the same for programs that fail alike), the name, and the numbers."""

    kind: str
    name: str
    detail: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.name}: {self.detail}"


@dataclass(frozen=True)
class Baseline:
    """The reference of a program: its runs in eager.

    Attributes:
        eager: its run in its own dtype.
        exact: its run in float64.
        limits: name of a tensor -> the largest error it may have.
        conditioned: whether no tensor is as sensitive to rounding as to make a comparison meaningless.
    """

    eager: Observed
    exact: Observed
    limits: Mapping[str, float]
    conditioned: bool


def baseline(case: Case) -> Baseline:
    """Run a program in eager: in its own dtype, in float64, and in float64 with noise of two kinds.

    Eager's error alone is no measure: it is zero by luck where its kernels happen to cancel exactly. So a tensor's is
    the largest of all calls, and operators that round otherwise tell how far correct implementations may be apart.
    """
    noise = NOISE[case.program.precision]
    eager = case.observe()
    exact = case.observe(dtype=torch.float64)
    others = [case.observe(dtype=torch.float64, shaken=noise.shaken)]
    for seed in range(_ROUNDED_RUNS):
        with Rounded(noise.rounded, seed):
            others.append(case.observe(dtype=torch.float64))
    if not eager.raised and any(run.raised for run in (exact, *others)):
        return Baseline(eager, exact, {}, False)
    # Until eager raises; a run in float64 may go on.
    common = {
        name: value for name, value in exact.tensors.items() if all(name in run.tensors for run in (eager, *others))
    }
    largest = {name: _largest(value) for name, value in common.items()}
    scales = {name: max(largest[name], LEAST * _largest_of_kind(largest, name)) for name in largest}
    errors: dict[str, float] = {}  # relative
    limits: dict[str, float] = {}
    conditioned = True
    for name, value in common.items():
        error = _distance(eager.tensors[name], value) / (scales[name] or 1)
        errors[_subject(name)] = _worst(error, errors.get(_subject(name), noise.floor))
    for name, value in common.items():
        error = errors[_subject(name)] * scales[name]
        moved = _worst(*(_distance(other.tensors[name], value) for other in others))
        limits[name] = noise.times * error + 2 * moved
        conditioned &= limits[name] <= noise.most * scales[name]  # False for NaN
    return Baseline(eager, exact, limits, conditioned)


def differences(ours: Observed, known: Baseline) -> Iterator[Difference]:
    """Yield the differences of a run from eager, the most serious first."""
    eager = known.eager
    if (ours.raised or eager.raised) and not _raised_alike(ours.raised, eager.raised):
        kind = _error_kind(ours.raised) if ours.raised else f"no error in the {eager.raised.stage}"  # type: ignore[union-attr]
        yield Difference(kind, "error", f"{ours.raised or 'nothing'}, eager: {eager.raised or 'nothing'}")
        return
    for name, limit in known.limits.items():
        exact, mine = known.exact.tensors[name], ours.tensors.get(name)
        if mine is None or mine.shape != exact.shape:
            continue  # a fact
        error = _distance(mine, exact)
        if not error <= limit:
            yield Difference(
                f"wrong {_kind(name)}",
                name,
                f"off by {error:.3g}, limit {limit:.3g}, "
                f"eager off by {_distance(eager.tensors[name], exact):.3g}, largest {_largest(exact):.3g}",
            )
    for name in sorted({**eager.facts, **ours.facts}, key=lambda name: "_is_view" in name):
        mine, theirs = ours.facts.get(name, "nothing"), eager.facts.get(name, "nothing")
        if name.endswith("_is_view") and not mine:
            continue  # more may be done with a tensor that is no view
        subject, _, fact = name.partition(", ")
        is_extra = ours.facts.get(f"{subject}, exists") and not eager.facts.get(f"{subject}, exists", True)
        if is_extra and fact != "exists":
            continue  # that it exists says it
        if mine != theirs:
            kind = _fact_kind(name) if not is_extra or ours.tensors[subject].any() else _ZEROS
            yield Difference(kind, name, f"{mine}, eager: {theirs}")


def check(case: Case, compile_: Compile | None = None, known: Baseline | None = None) -> tuple[str, list[Difference]]:
    """Compare a compiled program with eager.

    Args:
        compile_: another backend's compile, with the case's settings.
        known: the program's baseline, if the caller has it.

    Returns:
        "ok"; "wrong"; "torch" if the backend aot_eager has the same differences; or "unclear" if rounding decides the
        result of the program. And the differences.
    """
    known = known or baseline(case)
    if not known.conditioned:
        return "unclear", []
    compare = _compare_stored if case.setting in ("stored", "traced") and compile_ is None else _compare
    found = compare(case, compile_ or _ort_train(case), known)
    if not found:
        return "ok", []
    torchs = _compare_in("aot_eager", case, known)
    same = {(one.kind, one.name) for one in torchs}
    own = [one for one in found if (one.kind, one.name) not in same]
    if any(one.name == "error" for one in torchs):
        own = [one for one in own if one.kind != _ZEROS]  # AOTAutograd's, where that backend comes so far
    return ("wrong", own) if own else ("torch", found)


def has_in(backend: str, case: Case, kind: str) -> bool:
    """Check whether another backend has a difference of the same kind from eager."""
    return any(one.kind == kind for one in _compare_in(backend, case, baseline(case)))


def _compare_in(backend: str, case: Case, known: Baseline) -> list[Difference]:
    """Compare a backend of torch with eager."""
    with torch._functorch.config.patch(donated_buffer=False):  # else it refuses a second backward, as we do not
        return _compare(case, _backend(backend, case), known)


def _compare(case: Case, compile_: Compile, known: Baseline) -> list[Difference]:
    return [*differences(_compiled(case, compile_), known)]


def _compare_stored(case: Case, _: Compile, known: Baseline) -> list[Difference]:
    """Compile twice with one folder: the second run reads every graph, and has the same bits."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", f"{folder}/torch")
        compile_ = _backend("ort_train", case, options={**SETTINGS[case.setting], "cache": f"{folder}/graphs"})
        first = _compiled(case, compile_)
        before = Counter(COUNTS)
        second = _compiled(case, compile_)
    found = [*differences(second, known)]
    missed = {reason: count for reason, count in (COUNTS - before).items() if reason != "hit"}
    if missed:
        found.append(Difference("built again", "cache", str(missed)))
    for name, value in second.tensors.items():
        if not torch.equal(value.nan_to_num(), first.tensors[name].nan_to_num()):
            found.append(
                Difference("other bits from the cache", name, f"off by {_distance(value, first.tensors[name])}")
            )
    return found


def _compiled(case: Case, compile_: Compile) -> Observed:
    torch.compiler.reset()
    with _tiny_sizes() if case.setting == "sections" else nullcontext(), _untimed_guards():
        found = case.observe(compile_=compile_)
    torch.compiler.reset()
    return found


@contextmanager
def _untimed_guards() -> Iterator[None]:
    """Keep Dynamo from timing its guards after each compile: it flushes the processor's caches first."""
    if not hasattr(guards, "profile_guard_manager"):
        yield
        return
    with mock.patch.object(guards, "profile_guard_manager", return_value=0.0):
        yield


def _ort_train(case: Case) -> Compile:
    return _backend("ort_train", case, options=dict(SETTINGS[case.setting]) or None)


def _backend(backend: str, case: Case, **given: Any) -> Compile:
    dynamic = True if case.mode == "dynamic" else None
    return lambda module: torch.compile(module, backend=backend, dynamic=dynamic, **given)


@contextmanager
def _tiny_sizes() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch_facts(patch, section_bytes=256, repeated_bytes=1)
        yield


def _raised_alike(ours: Raised | None, eager: Raised | None) -> bool:
    if ours is None or eager is None:
        return False
    return isinstance(ours.error, type(eager.error))


def _error_kind(raised: Raised) -> str:
    message = re.sub(r"\d+|'[^']*'|0x\w+", "_", str(raised.error).strip().split("\n")[0])[:90]
    return f"{type(raised.error).__name__} in the {raised.stage}: {message}"


def _kind(name: str) -> str:
    """Return "result", "gradient", "buffer" or "argument" for "call 1: result 0" and the like."""
    return _subject(name).split(" ")[0]


def _subject(name: str) -> str:
    """Return a tensor's name without the call's number."""
    return name.split(": ")[1]


def _largest_of_kind(largest: Mapping[str, float], name: str) -> float:
    return max(size for other, size in largest.items() if _kind(other) == _kind(name))


def _fact_kind(name: str) -> str:
    subject, _, fact = name.partition(", ")
    return f"other {fact} of a {_kind(subject)}" if fact else f"other {subject.split(': ')[1]}"


def _worst(*errors: float) -> float:
    return math.nan if any(math.isnan(error) for error in errors) else max(errors)


def _largest(tensor: Tensor) -> float:
    return float(tensor.double().abs().max()) if tensor.numel() else 0.0


def _distance(one: Tensor, other: Tensor) -> float:
    """Return the largest difference; NaN where only one is."""
    a, b = one.double(), other.double()
    both = (a == b) | (a.isnan() & b.isnan())
    apart = torch.where(both, 0.0, (a - b).abs())
    return float(apart.max()) if apart.numel() else 0.0
