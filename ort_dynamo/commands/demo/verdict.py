"""Compare two trainings: the lines of the demo's report, and its verdicts."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from ort_dynamo.commands.demo.training import Outcome, Trace
from ort_dynamo.report.node_counts import BY_CHOICE, BY_DESIGN, FALLBACK, PLACE

__all__ = ["Verdict", "describe", "judge", "relative_differences"]

_FIRST = 20
_FIRST_LIMIT = 1e-4
_ALL = 200
_ALL_LIMIT = 0.02
_ACCURACY = 0.95


@dataclass(frozen=True)
class Verdict:
    """One requirement.

    Attributes:
        state: whether it is met.
        claim: the requirement, and the finding.
    """

    state: Literal["ok", "NOT OK", "not checked"]
    claim: str

    def __str__(self) -> str:
        return f"{self.state:<12}{self.claim}"


def relative_differences(eager: Sequence[float], ort: Sequence[float]) -> torch.Tensor:
    """|ort − eager| / |eager| of each step's loss, float64."""
    expected = torch.tensor(eager, dtype=torch.float64)
    return (torch.tensor(ort, dtype=torch.float64) - expected).abs() / expected.abs()


def judge(outcome: Outcome) -> list[Verdict]:
    """Return the requirements, in the order they are printed. A NaN anywhere meets none of them."""
    differences = relative_differences(outcome.eager.losses, outcome.ort.losses)
    steps = len(differences)
    verdicts = [
        _judge_curve(differences[:_FIRST], _FIRST, _FIRST_LIMIT, f"over the first {_FIRST} steps"),
        _judge_curve(differences[:_ALL], _ALL, _ALL_LIMIT, f"over {_ALL} steps"),
    ]
    if outcome.ort.accuracy is not None:
        claim = f"test accuracy of at least {_ACCURACY}"
        if steps < _ALL:
            verdicts.append(Verdict("not checked", f"{claim} (needs {_ALL} steps)"))
        else:
            state = _state(outcome.ort.accuracy >= _ACCURACY)
            verdicts.append(Verdict(state, f"{claim}: {outcome.ort.accuracy:.3f}"))
    compiled = outcome.counts.get("native_nodes", 0) + outcome.counts.get("chosen_nodes", 0)
    in_eager = outcome.counts.get("eager_nodes", 0)
    verdicts.append(Verdict(_state(compiled > 0 and in_eager == 0), f"no node {FALLBACK}: {in_eager}"))
    return verdicts


def _judge_curve(differences: torch.Tensor, needed: int, limit: float, where: str) -> Verdict:
    claim = f"losses within {limit:g} of eager's, relative, {where}"
    if len(differences) < needed:
        return Verdict("not checked", f"{claim} (needs {needed} steps)")
    greatest = differences.max().item()  # NaN if there is one
    return Verdict(_state(greatest <= limit), f"{claim}: {greatest:.1e}")


def _state(is_met: bool) -> Literal["ok", "NOT OK"]:
    return "ok" if is_met else "NOT OK"


def describe(outcome: Outcome) -> list[str]:
    """Return the lines of one model's report, without the verdicts."""
    eager, ort, counts = outcome.eager, outcome.ort, outcome.counts
    differences = relative_differences(eager.losses, ort.losses)
    first, last = differences[:_FIRST].max().item(), differences[-1].item()
    lines = [
        f"loss at step {len(differences)}: eager {eager.losses[-1]:.6f}, ort_train {ort.losses[-1]:.6f}",
        f"greatest relative difference of the losses: {differences.max().item():.1e} "
        f"(first {min(_FIRST, len(differences))} steps {first:.1e}, last step {last:.1e})",
    ]
    if eager.accuracy is not None and ort.accuracy is not None:
        lines.append(f"test accuracy: eager {eager.accuracy:.3f}, ort_train {ort.accuracy:.3f}")
    lines.append(
        f"first step, with compilation: eager {_milliseconds(eager.seconds[0])}, "
        f"ort_train {_milliseconds(ort.seconds[0])}"
    )
    lines += _step_times(eager, ort)
    lines.append(
        f"graphs compiled: {counts.get('graphs', 0)}; nodes: {counts.get('native_nodes', 0)} in ONNX Runtime, "
        f"{counts.get('by_design_nodes', 0)} {BY_DESIGN}, {counts.get('chosen_nodes', 0)} {BY_CHOICE}, "
        f"{counts.get('eager_nodes', 0)} {FALLBACK}"
    )
    if counts.get("chosen_nodes", 0):
        lines.append(f"  torch runs operators by choice where it is faster, such as conv nets on a CPU. {PLACE}")
    lines += [f"  {count} of {reason}" for reason, count in sorted(outcome.reasons.items())]
    return lines


def _step_times(eager: Trace, ort: Trace) -> list[str]:
    pairs = list(zip(eager.seconds, ort.seconds, strict=True))[1:]  # the first step compiles
    if not pairs:
        return []
    medians = [statistics.median(times) for times in zip(*pairs, strict=True)]
    ratio = statistics.median(mine / theirs for theirs, mine in pairs)
    return [
        f"median step: eager {_milliseconds(medians[0])}, ort_train {_milliseconds(medians[1])}; "
        f"median ratio of pairs {ratio:.2f}"
    ]


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
