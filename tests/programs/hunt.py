"""Compares many programs with eager, and prints those that differ, shrunk: `python tests/programs/hunt.py --help`.

Each hundred of them runs in a process of its own, so that memory does not grow, and so that a program which ends its
process is a failure and not the end of the hunt.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("ORT_DYNAMO_CACHE", "0")

_CHUNK = 100  # programs of a process
_SHRUNK = 3  # programs of one kind that are shrunk in a process
_PRINTED = 3  # programs of one kind that are printed
_UNFINISHED = ("begun", "running", "shrinking")  # "begun": it is written and runs in eager


@dataclass
class Findings:
    """The programs of a hunt, by how they ended: "ok", "torch", "unclear" or a kind of difference."""

    counts: Counter[str] = field(default_factory=Counter)
    alike: Counter[str] = field(default_factory=Counter)  # kinds of difference that aot_eager has, too
    failed: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    runs: Counter[str] = field(default_factory=Counter)  # by mode and setting
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, found: dict[str, Any]) -> None:
        with self.lock:
            self.counts[found["state"]] += 1
            self.runs[f"{found['mode']}, {found['setting']}"] += 1
            if found["state"] == "torch":
                self.alike[found["kind"]] += 1
            elif found["state"] in ("wrong", "crash"):
                self.failed[found["kind"]].append(found)
                print(f"{found['mode']} {found['seed']} {found['setting']}: {found['said']}", flush=True)

    def keep(self, folder: Path) -> None:
        from program_kept import keep

        for kind, found in self.failed.items():
            keep(min((one["text"] for one in found), key=len), kind, folder)

    def report(self) -> Iterator[str]:
        yield " ".join(f"{state}: {count}" for state, count in self.counts.most_common())
        yield ", ".join(f"{count} {run}" for run, count in sorted(self.runs.items()))
        yield from (f"torch's own: {count} of {kind}" for kind, count in self.alike.most_common())
        for kind, found in sorted(self.failed.items(), key=lambda item: -len(item[1])):
            seeds = ", ".join(f"{one['mode']} {one['seed']}" for one in found)
            yield f"\n=== {len(found)} of {kind}: {seeds}"
            for one in sorted(found, key=lambda one: len(one["text"]))[:_PRINTED]:
                yield f"\n# seed {one['seed']}: {one['said']}\n{one['text']}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=("inference", "training", "dynamic", "all"), default="all")
    parser.add_argument("--seeds", default="0:100", metavar="FROM:TO")
    parser.add_argument("--setting", help="of all programs; by default each seed chooses one")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--out", type=Path, help="a file for the report, too")
    parser.add_argument("--keep", type=Path, help="a folder for the smallest program of each kind: tests/programs/kept")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    first, last = (int(seed) for seed in given.seeds.split(":"))
    modes = ("inference", "training", "dynamic") if given.mode == "all" else (given.mode,)
    if given.worker:
        _work(modes[0], range(first, last), given.setting)
        return 0
    findings = Findings()
    chunks = [(mode, range(start, min(start + _CHUNK, last))) for start in range(first, last, _CHUNK) for mode in modes]
    with ThreadPoolExecutor(given.jobs) as pool:
        for _ in pool.map(lambda chunk: _hunt(*chunk, given.setting, findings), chunks):
            pass
    report = "\n".join(findings.report())
    print(report)
    if given.out:
        given.out.write_text(report + "\n", encoding="utf-8")
    if given.keep:
        findings.keep(given.keep)
    return 1 if findings.failed else 0


def _hunt(mode: str, seeds: Sequence[int], setting: str | None, findings: Findings) -> None:
    """Run programs in a process; if one ends it, continue after that one."""
    while seeds:
        command = [sys.executable, __file__, "--worker", "--mode", mode, "--seeds", f"{seeds[0]}:{seeds[-1] + 1}"]
        command += ["--setting", setting] if setting else []
        last: dict[str, Any] = {"state": "begun", "seed": seeds[0], "mode": mode, "setting": setting, "text": ""}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            for line in process.stdout or ():
                if not line.startswith("{"):
                    continue  # a library's own line
                last = json.loads(line)
                if last["state"] not in _UNFINISHED:
                    findings.add(last)
        if process.returncode == 0:
            return
        findings.add(_ended(last, mode, f"the process ended with status {process.returncode}"))
        seeds = range(last["seed"] + 1, seeds[-1] + 1)


def _ended(last: dict[str, Any], mode: str, said: str) -> dict[str, Any]:
    """Return the outcome of a program whose process ended: torch's fault unless this backend had begun to run it."""
    if last["state"] == "shrinking":
        return {**last, "state": "wrong"}
    kind = said if last["state"] == "running" else f"{said} in eager"
    return {**last, "state": "crash" if kind == said else "torch", "kind": kind, "said": said, "mode": mode}


def _work(mode: str, seeds: Sequence[int], setting: str | None) -> None:
    """Print a line of JSON as each program begins and as it ends; alone on the standard output."""
    import torch
    from program_comparison import check, has_in
    from program_shrink import shrink
    from program_writer import write_case

    out, sys.stdout = sys.stdout, sys.stderr
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    shrunk: Counter[str] = Counter()
    for seed in seeds:
        begun = {"seed": seed, "state": "begun", "mode": mode, "setting": setting, "text": ""}
        print(json.dumps(begun), file=out, flush=True)
        case, known = write_case(seed, mode, setting)
        ended = {"seed": seed, "state": "running", "mode": mode, "setting": case.setting, "text": case.text()}
        print(json.dumps(ended), file=out, flush=True)
        state, found = check(case, known=known)
        if found:
            ended |= {"kind": found[0].kind, "said": str(found[0])}
        if state == "wrong" and shrunk[found[0].kind] < _SHRUNK:
            print(json.dumps({**ended, "state": "shrinking"}), file=out, flush=True)
            shrunk[found[0].kind] += 1
            smallest = shrink(case, found[0].kind)
            ended["text"] = smallest.text()
            if has_in("inductor", smallest, found[0].kind):
                ended["said"] += " (inductor has it, too)"
        print(json.dumps({**ended, "state": state}), file=out, flush=True)


if __name__ == "__main__":
    sys.exit(main())
