"""Gives readers damaged input: `python tests/fuzz/fuzz.py --count 2000 --seed 1`.

Each target runs in processes of its own, so that one which ends its process, does not end or takes too much memory is a
failure and not the end. A case is known by target, seed and number; `--case` runs one again, with its traceback:

    python tests/fuzz/fuzz.py --target passes --seed 1 --case 17

With `--atheris` (installed by the user), the choices of one target come from a fuzzer that is guided by coverage.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import signal
import subprocess
import sys
import traceback
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("ORT_DYNAMO_CACHE", "0")
_ROOT = Path(__file__).resolve().parents[2]
_FOLDERS = ("fuzz", "training", "onnx_module")
_SECONDS = 60
"""Seconds for a case; one that takes longer hangs."""
_MEMORY = 10 << 30
"""Bytes of a process's address space, most of which torch's libraries take."""
_CHUNK = 3000
"""Cases of a process."""


@dataclass
class Findings:
    """The ends of cases, by target."""

    counts: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    failures: list[str] = field(default_factory=list)

    def add(self, name: str, seed: int, number: int, state: str, said: str) -> None:
        self.counts[name][state] += 1
        if said:
            self.failures.append(f"--target {name} --seed {seed} --case {number}: {said}")
            print(self.failures[-1], flush=True)


def main() -> int:
    """Run the cases that the command line asks for; the status is 1 if any failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="one target; by default all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, help="cases of each target; by default those of the test run")
    parser.add_argument("--case", type=int, help="run this case here, and show its traceback")
    parser.add_argument("--atheris", nargs=argparse.REMAINDER, help="arguments of libFuzzer, such as -runs=1000")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    sys.path[:0] = [str(_ROOT), *(str(_ROOT / "tests" / folder) for folder in _FOLDERS)]
    if given.worker is not None:
        _work(given.worker, json.load(sys.stdin))
    elif given.atheris is not None:
        _guided(given.target, given.atheris)
    elif given.case is not None:
        print(_case(given.target, given.seed, given.case))
    else:
        names = [given.target] if given.target else list(COUNTS)
        counts = {name: COUNTS[name] if given.count is None else given.count for name in names}
        cases = [(name, given.seed, number) for name, count in counts.items() for number in range(count)]
        found = Findings()
        for first in range(0, len(cases), _CHUNK):
            _hunt(cases[first : first + _CHUNK], found)
        for name, seen in found.counts.items():
            states = ", ".join(f"{count} {state}" for state, count in seen.most_common())
            print(f"{name}, seed {given.seed}: {states}")
        return int(bool(found.failures))
    return 0


def _case(name: str, seed: int, number: int) -> str:
    from fuzz_targets import TARGETS, quietly

    return quietly(TARGETS[name], random.Random(f"{name} {seed} {number}"))


def _hunt(cases: list[tuple[str, int, int]], found: Findings) -> None:
    """Run cases in a process, and in another from the case after the one that ended it."""
    while cases:
        read, write = os.pipe()
        process = subprocess.Popen(
            [sys.executable, __file__, "--worker", str(write)], stdin=subprocess.PIPE, text=True, pass_fds=[write]
        )
        os.close(write)
        assert process.stdin is not None
        with process.stdin as stdin:
            json.dump(cases, stdin)
        done = 0
        with open(read, encoding="utf-8") as answers:
            for line in answers:
                found.add(*cases[done], *json.loads(line))
                done += 1
        if status := process.wait():
            found.add(*cases[done], "ended its process", f"its process ended with status {status}")
            done += 1
        cases = cases[done:]


def _work(pipe: int, cases: list[tuple[str, int, int]]) -> None:
    import fuzz_targets  # noqa: F401  # its import takes longer than a case may

    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process, in native code or not
    with open(pipe, "w", encoding="utf-8", buffering=1) as answers:
        for case in cases:
            signal.alarm(_SECONDS)
            try:
                state, said = _case(*case), ""
            except BaseException as error:
                place = traceback.extract_tb(error.__traceback__)[-1]
                state = "failed"
                said = f"{type(error).__name__}: {str(error)[:300]} ({place.filename}:{place.lineno})"
            signal.alarm(0)
            answers.write(json.dumps([state, said]) + "\n")


def _guided(name: str, arguments: list[str]) -> None:
    import atheris

    with atheris.instrument_imports(include=["ort_dynamo"]):
        from fuzz_mutations import BytesRandom
        from fuzz_targets import TARGETS, quietly

    def run(data: bytes) -> None:
        quietly(TARGETS[name], BytesRandom(data))

    atheris.Setup([sys.argv[0], *arguments], run)
    atheris.Fuzz()


COUNTS = {"onnx_module": 80, "passes": 50, "entry": 150, "checkpoint": 40, "json": 40, "trainer": 8}
"""Target -> its cases in the ordinary test run."""

if __name__ == "__main__":
    sys.exit(main())
