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
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from operator_jobs import Job, cases_of, prepare
from opinfo_samples import DTYPES, operators
from workers import Worker

from ort_dynamo.runtime.installed.capabilities import installed_runtime

_HANGS_AFTER = 300.0
"""Seconds for one sample."""


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
        worker = Worker(prepare, cases_of, _HANGS_AFTER)
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
        native.update(verdict.get("native", {}))
        eager.update(verdict.get("eager", {}))
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
