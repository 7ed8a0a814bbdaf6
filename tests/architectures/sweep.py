"""Sweeps the model types of transformers under ort_train: tiny, untrained, a training step against eager.

    python tests/architectures/sweep.py --results stock.json
    python tests/architectures/sweep.py --only 'qwen*' detr --evaluation --results more.json
    python tests/architectures/write_report.py stock.json more.json

Each type runs in a process of its own, forked from one that has imported everything; one that dies or hangs is
recorded as such. With --results, types that the file has already are not run again.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import logging
import multiprocessing
import traceback
import warnings
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

from architecture_check import NotBuiltError, check, model_types

from ort_dynamo.runtime.installed.capabilities import installed_runtime


def _serve(connection: Any, model_type: str, evaluate: bool) -> None:
    try:
        record = check(model_type, evaluate)
    except NotBuiltError as error:
        record = {"kind": "not built", "details": {"": str(error)}}
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        detail = f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
        record = {"kind": "failed", "details": {"": detail[:1000]}}
    connection.send(record)


def run_alone(model_type: str, evaluate: bool, seconds: float) -> dict[str, Any]:
    """`check` in a process of its own, stopped after `seconds`."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(theirs, model_type, evaluate))
    process.start()
    theirs.close()
    try:
        record = ours.recv() if ours.poll(seconds) else {"kind": "too slow", "details": {}}
    except EOFError:
        record = {"kind": "crashed", "details": {}}
    process.kill()
    process.join()
    return {"model_type": model_type, **record}


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", metavar="PATTERN", default=["*"], help="model types, as shell patterns, in this order"
    )
    parser.add_argument("--evaluation", action="store_true", help="compare an evaluation without gradients, too")
    parser.add_argument("--seconds", type=float, default=300, help="at most for one model type")
    parser.add_argument("--results", type=Path, help="a JSON file of all records, written after each type")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")  # the models warn about themselves
    logging.disable(logging.WARNING)
    runtime = installed_runtime()
    about = {
        "runtime": f"{runtime.package} {runtime.version}",
        "torch": version("torch").split("+")[0],
        "transformers": version("transformers"),
    }
    records: list[dict[str, Any]] = []
    if arguments.results and arguments.results.exists():
        records = json.loads(arguments.results.read_text())["records"]
    known = {record["model_type"] for record in records}
    types = model_types()
    for name in dict.fromkeys(name for pattern in arguments.only for name in fnmatch.filter(types, pattern)):
        if name in known:
            continue
        records.append(run_alone(name, arguments.evaluation, arguments.seconds))
        print(f"{name}: {records[-1]['kind']}, {records[-1].get('eager') or ''}", flush=True)
        if arguments.results:
            arguments.results.write_text(json.dumps({**about, "records": records}, indent=1))
    total = Counter(record["kind"] for record in records)
    print(", ".join(f"{count} {kind}" for kind, count in total.most_common()))
    return int(any(total[kind] for kind in ("different", "failed", "crashed")))


if __name__ == "__main__":
    raise SystemExit(main())
