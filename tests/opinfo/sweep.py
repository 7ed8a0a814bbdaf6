"""Sweeps PyTorch's operator database under ort_train: every operator, forward and backward.

    python tests/opinfo/sweep.py --dtypes float32 int64 --results results.json
    python tests/opinfo/sweep.py --only 'nn.functional.*pool*' --samples 8
    python tests/opinfo/write_report.py results.json more.json

Operators run in worker processes. A worker that dies or hangs costs one sample, which is recorded as a crash.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import multiprocessing
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from opinfo_samples import DTYPES, check_sample, operators, samples_of

from ort_dynamo.runtime.capabilities import installed_runtime

_HANGS_AFTER = 300.0
"""Seconds for one sample."""


@dataclass(frozen=True)
class Job:
    """One operator and dtype, or the rest of its samples after a crash."""

    operator: str
    dtype: str
    samples: int | None
    dynamic: bool
    in_place: bool
    seed: int = 0
    capture: bool = False
    first: int = 0


def _serve(connection: Any, threads: int) -> None:
    """A worker: receives jobs, sends (sample index, None) before and (index, verdict) after each sample, then None."""
    import logging

    import torch
    import torch._dynamo

    torch.set_num_threads(threads)
    logging.disable(logging.WARNING)  # each node that stays in eager; the counters say it
    while (job := connection.recv()) is not None:
        op = operators()[job.operator]
        torch._dynamo.config.capture_dynamic_output_shape_ops = job.capture
        torch._dynamo.config.capture_scalar_outputs = job.capture
        for index, sample in enumerate(samples_of(op, DTYPES[job.dtype], job.samples, job.seed)):
            if index < job.first:
                continue
            connection.send((index, None))
            verdict = check_sample(op, sample, DTYPES[job.dtype], dynamic=job.dynamic, in_place=job.in_place)
            connection.send((index, asdict(verdict)))
        connection.send(None)


class _Worker:
    """Runs jobs one after another in a process of its own, which it replaces when it dies."""

    def __init__(self) -> None:
        self._process: Any = None

    def run(self, job: Job) -> list[dict[str, Any]]:
        verdicts: list[dict[str, Any]] = []
        while True:
            if self._process is None:
                self._start()
            index = job.first
            try:
                self._connection.send(job)
                while (message := self._receive()) is not None:
                    index, verdict = message
                    if verdict is not None:
                        verdicts.append(verdict)
                return verdicts
            except (EOFError, BrokenPipeError, TimeoutError) as error:
                self._process.kill()
                self._process.join()
                status = self._process.exitcode
                self._process = None
                why = "hangs" if isinstance(error, TimeoutError) else f"the process ended with status {status}"
                verdicts.append({"kind": "crashed", "detail": f"sample {index}: {why}", "native": {}, "eager": {}})
                job = Job(**{**asdict(job), "first": index + 1})

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, 1), daemon=True)
        self._process.start()
        theirs.close()

    def _receive(self) -> Any:
        if not self._connection.poll(_HANGS_AFTER):
            raise TimeoutError
        return self._connection.recv()

    def stop(self) -> None:
        if self._process is not None:
            self._connection.send(None)
            self._process.join()


def sweep(jobs: Iterable[Job], workers: int, keep: Callable[[list[dict[str, Any]]], None]) -> list[dict[str, Any]]:
    """Run all jobs. Gives one record a job: its fields, its verdicts' kinds counted, details, nodes.

    Args:
        keep: is given all records so far after each job.
    """
    waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
    jobs = list(jobs)
    for job in jobs:
        waiting.put(job)
    records: list[dict[str, Any]] = []
    begin = time.monotonic()
    one_at_a_time = threading.Lock()

    def work() -> None:
        worker = _Worker()
        while True:
            try:
                job = waiting.get_nowait()
            except queue.Empty:
                break
            record = _record(job, worker.run(job))
            with one_at_a_time:
                records.append(record)
                _say(record, len(records), len(jobs), time.monotonic() - begin)
                keep(records)
        worker.stop()

    threads = [threading.Thread(target=work) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return records


def _record(job: Job, verdicts: list[dict[str, Any]]) -> dict[str, Any]:
    native: Counter[str] = Counter()
    eager: Counter[str] = Counter()
    for verdict in verdicts:
        native.update(verdict["native"])
        eager.update(verdict["eager"])
    details = Counter(f"{v['kind']}: {v['detail']}" for v in verdicts if v["kind"] != "same")
    kinds = Counter(v["kind"] for v in verdicts)
    return {**asdict(job), "kinds": dict(kinds), "details": dict(details), "native": dict(native), "eager": dict(eager)}


def _say(record: dict[str, Any], done: int, total: int, seconds: float) -> None:
    bad = sum(record["kinds"].get(kind, 0) for kind in ("different", "failed", "crashed"))
    if bad:
        worst = next(d for d in record["details"] if not d.startswith(("not ", "more exact", "other ties")))
        print(f"{record['operator']} {record['dtype']}: {bad} bad of {sum(record['kinds'].values())}; {worst[:300]}")
    if done % 25 == 0 or done == total:
        print(f"[{done}/{total}, {seconds:.0f} s]", flush=True)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["float32"])
    parser.add_argument("--only", nargs="+", metavar="PATTERN", default=["*"], help="operators, as shell patterns")
    parser.add_argument("--samples", type=int, help="at most so many of each operator (default: all)")
    parser.add_argument("--dynamic", action="store_true", help="compile with symbolic sizes")
    parser.add_argument("--in-place", action="store_true", help="the in-place variants, of operators that have one")
    parser.add_argument("--capture", action="store_true", help="have Dynamo capture shapes and numbers made from data")
    parser.add_argument("--seed", type=int, default=0, help="of the samples' numbers")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--results", type=Path, help="a JSON file of all records, written after each operator")
    arguments = parser.parse_args()
    samples = arguments.samples
    jobs = [
        Job(name, dtype, samples, arguments.dynamic, arguments.in_place, arguments.seed, arguments.capture)
        for dtype in arguments.dtypes
        for name, op in operators().items()
        if any(fnmatch.fnmatch(name, pattern) for pattern in arguments.only)
        and (not arguments.in_place or op.get_inplace() is not None)
    ]
    runtime = installed_runtime()
    about = {"runtime": f"{runtime.package} {runtime.version}", "torch": version("torch").split("+")[0]}

    def keep(records: list[dict[str, Any]]) -> None:
        if arguments.results:
            ordered = sorted(records, key=lambda record: (record["dtype"], record["operator"]))
            arguments.results.write_text(json.dumps({**about, "records": ordered}, indent=1))

    records = sweep(jobs, arguments.workers, keep)
    total = Counter(kind for record in records for kind, n in record["kinds"].items() for _ in range(n))
    print(", ".join(f"{n} {kind}" for kind, n in total.most_common()))
    sent = {overload for record in records for overload in record["native"]}
    stay = {text.split(": ")[0] for record in records for text in record["eager"]}
    counted = f"{len(sent - stay)} native, {len(sent & stay)} in part, {len(stay - sent)} eager"
    print(f"{len(sent | stay)} overloads sent: {counted}")
    return int(any(total[kind] for kind in ("different", "failed", "crashed")))


if __name__ == "__main__":
    raise SystemExit(main())
