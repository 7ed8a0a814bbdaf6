"""Interleaved measurement: the contestants run in turn, in one process, and each round gives one ratio for each pair.

The speed of a shared machine drifts by a factor of three within minutes, and the drift hits the runs of one round
alike. So a ratio is formed within a round, and the report has the median of the rounds' ratios and their spread.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

__all__ = ["Clock", "Sample", "Spread", "Timings", "run_interleaved"]

Clock = Literal["wall", "cpu"]


@dataclass(frozen=True)
class Sample:
    """The time of one contestant in one round.

    Attributes:
        wall: seconds on the clock.
        cpu: seconds of processor time of all threads of the process; spinning threads show here.
    """

    wall: float
    cpu: float


@dataclass(frozen=True)
class Spread:
    """A series in five numbers: median, quartiles and extremes."""

    median: float
    q1: float
    q3: float
    min: float
    max: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """The spread of one value or more."""
        quartiles = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3
        q1, median, q3 = quartiles
        return Spread(median, q1, q3, min(values), max(values))


@dataclass(frozen=True)
class Timings:
    """contestant -> its samples, one a round, in the order of the rounds."""

    samples: Mapping[str, Sequence[Sample]]

    def ratio(self, numerator: str, denominator: str, clock: Clock) -> Spread | None:
        """The spread of the rounds' ratios, or None if one of the two did not run."""
        if numerator not in self.samples or denominator not in self.samples:
            return None
        pairs = zip(self.samples[numerator], self.samples[denominator], strict=True)
        return Spread.of([getattr(above, clock) / getattr(below, clock) for above, below in pairs])

    def seconds(self, name: str) -> Spread:
        """The spread of a contestant's wall times: for scale, never for comparison between two runs."""
        return Spread.of([sample.wall for sample in self.samples[name]])


def run_interleaved(
    benchmark: Any, contestants: Mapping[str, Callable[[], object]], subject: str, rounds: int
) -> Timings:
    """Run every contestant once a round.

    The order within a round goes through all permutations, since threads that still spin when one contestant has
    ended slow down the next. Garbage is collected between rounds.

    Args:
        benchmark: pytest-benchmark's fixture. Its own statistics are of `subject` alone; the others run in its
            set-up and tear-down.
        contestants: name -> the function that it calls in a round.
        subject: one of the names.
        rounds: one or more.
    """
    others = [name for name in contestants if name != subject]
    # The first order ends with the subject: under --benchmark-disable there is one round and no tear-down.
    orders = itertools.cycle(itertools.permutations([*others, subject]))
    samples: dict[str, list[Sample]] = {name: [] for name in contestants}
    after: list[str] = []

    def run(*names: str) -> None:
        for name in names:
            cpu, wall = time.process_time(), time.perf_counter()
            contestants[name]()
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            samples[name].append(Sample(wall, cpu))

    def run_those_before() -> None:
        order = next(orders)
        turn = order.index(subject)
        after[:] = order[turn + 1 :]
        gc.collect()
        run(*order[:turn])

    benchmark.pedantic(partial(run, subject), setup=run_those_before, teardown=lambda: run(*after), rounds=rounds)
    return Timings(samples)
