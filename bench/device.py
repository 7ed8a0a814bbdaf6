"""One command for a CUDA device, within four minutes: is everything right there?

    python -m bench.device --out device.json

It runs `doctor`, a table of facts of kernels, the checks of `bench.cuda`, the tests marked `cuda`, training of small
models, and a fixed sample of PyTorch's operator database. Several processes share the device. A case that crashes or
hangs costs itself: its process is replaced. Each part has a deadline, after which none of its cases begins.

Faults are printed first, then a table, then the path of the JSON. The status is 1 if a case was wrong, or if none
of a part ran. `--device cpu` runs the same without a device.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.cuda import about, try_out
from bench.device_parts import LOGS, PARTS, Job, Part, Plan, Worker, cases_of, prepare

__all__ = ["Schedule", "main", "report", "run_all"]

Record = dict[str, Any]
"""A case: "part", "name", "kind" (right, wrong, crashed, skipped, not run), "detail" and its findings."""

KINDS = ("right", "wrong", "crashed", "skipped", "not run")
BAD = ("wrong", "crashed")
_CASE_SECONDS = 90.0
_LEFT_AT_THE_END = 3.0
"""Seconds for the report, after the last process has ended."""


class Schedule:
    """Hands out the cases of all parts in their order, each until the deadline of its part.

    Args:
        parts: name -> part.
        plan: the selection of cases and their sizes.
        begin: when the time began, by time.monotonic.
        seconds: of all.
        keep: called with all records so far, after each.
    """

    def __init__(
        self,
        parts: Mapping[str, Part],
        plan: Plan,
        begin: float,
        seconds: float,
        keep: Callable[[Sequence[Record]], None] = lambda records: None,
    ) -> None:
        self.records: list[Record] = []
        self._plan, self._keep = plan, keep
        self._deadlines = {name: begin + part.until * seconds for name, part in parts.items()}
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(max_workers=len(parts) or 1)
        self._names: dict[str, Future[list[str]]] = {
            name: self._pool.submit(part.names, plan) for name, part in parts.items()
        }
        self._waiting: list[Job] = []

    def take(self) -> Job | None:
        """The next case that may begin, or None at the end."""
        with self._lock:
            while True:
                while not self._waiting:
                    if not self._names:
                        self._pool.shutdown(wait=False)
                        return None
                    self._find_next_part()
                job = self._waiting.pop(0)
                if time.monotonic() < self._deadlines[job.part]:
                    return job
                self._add(job, {"kind": "not run", "detail": "the time of this part was over"})

    def _find_next_part(self) -> None:
        part = next(iter(self._names))
        try:
            names = self._names.pop(part).result()
        except Exception as error:  # without names a part has no case, which is wrong
            said = f"{type(error).__name__}: {error}".splitlines()[0]
            self._add(Job(part, "(its cases)", self._plan), {"kind": "wrong", "detail": said})
            return
        only = self._plan.only
        self._waiting = [Job(part, name, self._plan) for name in names if only in f"{part}: {name}"]

    def add(self, job: Job, verdict: Record) -> None:
        """Record the outcome of a case."""
        with self._lock:
            self._add(job, verdict)

    def _add(self, job: Job, verdict: Record) -> None:
        self.records.append({"part": job.part, "name": job.name, **verdict})
        self._keep(self.records)


def run_all(schedule: Schedule, workers: Iterable[Worker]) -> list[Record]:
    """Run all cases of a schedule."""

    def work(worker: Worker) -> None:
        try:
            while (job := schedule.take()) is not None:
                for verdict in worker.run(job):
                    schedule.add(job, verdict)
        finally:
            worker.stop()

    threads = [threading.Thread(target=work, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return schedule.records


def report(records: Sequence[Record]) -> list[str]:
    """List the wrong cases, a line each; then the parts, a line each; then facts for which nothing was expected."""
    bad = [f"{record['part']}: {record['name']}: {_line(record)}" for record in records if record["kind"] in BAD]
    if not records:
        return ["no case has such a name"]
    idle = _idle(records)
    rest = f", but no case ran of {', '.join(idle)}" if idle else ""
    lines = [f"{len(bad)} wrong" if bad else f"nothing was wrong{rest}", *bad, ""]
    rows = [("part", "cases", *KINDS, "seconds")]
    for part in dict.fromkeys(record["part"] for record in records):
        mine = [record for record in records if record["part"] == part]
        kinds = Counter(record["kind"] for record in mine)
        took = sum(record.get("took", 0.0) for record in mine)
        rows.append((part, str(len(mine)), *(str(kinds[kind]) for kind in KINDS), f"{took:.0f}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *cells in rows:
        aligned = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        lines.append("  ".join([name.ljust(widths[0]), *aligned]))
    news = [
        f"{record['name']}: {record['found']['found']}"
        for record in records
        if record["part"] == "facts" and record["kind"] == "right" and not record["found"].get("expected")
    ]
    return [*lines, "", "found, where nothing was expected:", *news] if news else lines


def _line(record: Record) -> str:
    return (record["kind"] + ": " if record["kind"] == "crashed" else "") + " ".join(record["detail"].split())


def is_bad(records: Sequence[Record]) -> bool:
    """Tell if a case was wrong, or none of a part ran, or nothing at all."""
    return not records or bool(_idle(records)) or any(record["kind"] in BAD for record in records)


def _idle(records: Sequence[Record]) -> list[str]:
    """Give the parts that had cases, and ran none."""
    ran = {record["part"] for record in records if record["kind"] != "not run"}
    return [part for part in dict.fromkeys(record["part"] for record in records) if part not in ran]


def said_in(folder: Path) -> dict[str, int]:
    """Each line that the processes wrote, as often as it came, the most frequent ones first."""
    lines: Counter[str] = Counter()
    for path in sorted(folder.glob("*.txt")):
        lines.update(line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip())
    return dict(lines.most_common(100))


def main(given: Sequence[str] | None = None) -> int:
    """Run it.

    Returns:
        0, 1 if a case was wrong or none of a part ran, 2 without a device, or if the file cannot be written.
    """
    begin = time.monotonic()
    parser = argparse.ArgumentParser(prog="python -m bench.device", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda", help="default: cuda")
    parser.add_argument("--scale", choices=("tiny", "full"), help="of the models; default: full, tiny on a CPU")
    parser.add_argument("--seconds", type=float, default=240, help="of all; default: 240")
    parser.add_argument("--workers", type=int, help="processes that share the device; default: 8, 2 on a CPU")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    parser.add_argument("--only", default="", help='cases whose names, as in "operators: add float32", contain this')
    parser.add_argument("--units", type=int, default=800, help="operators in dtypes, drawn at random; default: 800")
    parser.add_argument("--seed", type=int, default=0, help="of that draw")
    parser.add_argument("--out", type=Path, default=Path("device.json"), help="default: device.json")
    arguments = parser.parse_args(given)
    device = torch.device(arguments.device)
    on_cuda = device.type == "cuda"
    if on_cuda and not torch.cuda.is_available():
        print("torch sees no CUDA device: --device cpu tries the code", file=sys.stderr)
        return 2
    os.environ.setdefault("ORT_DYNAMO_CACHE", "0")
    name = f"cuda:{device.index or 0}" if on_cuda else arguments.device
    scale = arguments.scale or ("full" if on_cuda else "tiny")
    plan = Plan(name, scale, arguments.units, arguments.seed, arguments.only)
    kept: Record = {"about": about(torch.device(name)), "plan": vars(plan)}

    def keep(records: Sequence[Record], every: int = 25) -> None:
        if len(records) % every == 0:
            arguments.out.write_text(json.dumps({**kept, "cases": records}, indent=1))

    try_out(parser, lambda: keep([]))
    with tempfile.TemporaryDirectory() as logs:
        os.environ[LOGS] = logs
        schedule = Schedule({part: PARTS[part] for part in arguments.parts}, plan, begin, arguments.seconds, keep)
        end = begin + arguments.seconds - _LEFT_AT_THE_END
        new_worker = partial(Worker, prepare, cases_of, _CASE_SECONDS, end)
        try:
            records = run_all(schedule, [new_worker() for _ in range(arguments.workers or (8 if on_cuda else 2))])
        finally:
            del os.environ[LOGS]
        kept |= {"took": round(time.monotonic() - begin, 1), "said": said_in(Path(logs))}
    keep(records, 1)
    print(*report(records), "", sep="\n")
    print(*(f"{what}: {value}" for what, value in kept["about"].items()), sep="\n")
    print(f"took: {kept['took']} s\nlines that the processes wrote: {len(kept['said'])}\nJSON: {arguments.out}")
    return int(is_bad(records))


if __name__ == "__main__":
    sys.exit(main())
