"""Writes docs/internals/operator_sweep.md from the results of sweep.py.

python tests/opinfo/write_report.py results.json more.json --older all_samples.json
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs/internals/operator_sweep.md"

_INTRODUCTION = """\
# PyTorch's operator database under ort_train

Every operator variant of `torch.testing._internal.common_methods_invocations.op_db`, compiled with `ort_train` and compared with
eager. The forward runs, and the backward with random gradients of the results. Compared are values, dtypes, shapes, strides of
outputs, `None` gradients, and arguments after the call. Made by `python tests/opinfo/sweep.py --results FILE` and
`python tests/opinfo/write_report.py FILE …`. CI runs one sample of every operator (`tests/opinfo/test_opinfo.py`).

Rows without a limit have all samples of each operator. In float32, maximum pooling has a row of its own.

| word | meaning |
|---|---|
| other ties | only the choice among equal elements differs, which torch does not define: unstable sorts, `topk`, `kthvalue`, `mode`, and medians along a dimension. Values are equal, positions select equal values, gradients follow the positions ([numerics](../reference/numerics.md)) |
| more exact | differs from eager, and is as close to eager's result in float64 as eager is |
| not comparable | eager raises, or torch's own tracing without a compiler (`aot_eager`) is not right either |
| not compiled | Dynamo makes no graph |
| different, failed, crashed | faults of `ort_train` |
| native | overloads of which ONNX Runtime ran every node |
| in part | overloads that stayed in eager for some samples |
"""  # noqa: E501


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--older", nargs="*", type=Path, default=[], help="results from before later lowerings: rows")
    arguments = parser.parse_args()
    results, older = ([json.loads(p.read_text()) for p in ps] for ps in (arguments.results, arguments.older))
    lines = [_INTRODUCTION, *_totals(results + older), "", *_reasons(results), "", *_bad(results + older)]
    PAGE.write_text("\n".join(lines).rstrip() + "\n")
    return 0


def _runs(results: Iterable[dict[str, Any]]) -> Iterable[tuple[tuple[str, str, str], list[dict[str, Any]]]]:
    """(runtime, dtype, how) -> records."""
    flat = [
        ((result["runtime"], record["dtype"], _how(record)), record)
        for result in results
        for record in result["records"]
        if record["kinds"]
    ]
    for key, group in groupby(sorted(flat, key=lambda one: one[0]), key=lambda one: one[0]):
        yield key, [record for _, record in group]


def _how(record: dict[str, Any]) -> str:
    how = "in place" if record["in_place"] else "dynamic shapes" if record["dynamic"] else "static shapes"
    if record.get("capture"):
        how += ", sizes made from data captured"
    if record.get("seed"):
        how += f", seed {record['seed']}"
    return how if record["samples"] is None else f"{how}, at most {record['samples']} samples"


def _totals(results: list[dict[str, Any]]) -> list[str]:
    kinds = ("same", "other ties", "more exact", "not compiled", "not comparable", "different", "failed", "crashed")
    lines = [
        "| runtime | dtype | how | operators | " + " | ".join(kinds) + " | overloads | native | in part | eager |",
        "|" + "---|" * 16,
    ]
    for (runtime, dtype, how), records in _runs(results):
        total: Counter[str] = Counter()
        for record in records:
            total.update(record["kinds"])
        native = {overload for record in records for overload in record["native"]}
        eager = {text.split(": ")[0] for record in records for text in record["eager"]}
        cells = [runtime, dtype, how, len(records), *(total[kind] for kind in kinds)]
        cells += [len(native | eager), len(native - eager), len(native & eager), len(eager - native)]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def _reasons(results: list[dict[str, Any]]) -> list[str]:
    """List the fallbacks in float32, with every reason."""
    reasons: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    native = set()
    for (runtime, dtype, _), records in _runs(results):
        if dtype != "float32":
            continue
        for record in records:
            native.update(record["native"])
            for text in record["eager"]:
                overload, reason = text.split(": ", 1)
                reasons[overload][reason].add(runtime)
    every = {result["runtime"] for result in results}
    lines = [
        "## Operators in eager (float32 sweep)",
        "",
        "Integer and complex intermediate tensors of float32 operators are included.",
        "",
        "| overload | always | reasons |",
        "|---|---|---|",
    ]
    for overload, found in sorted(reasons.items()):
        texts = [text + ("" if on == every else f" ({', '.join(sorted(on))})") for text, on in sorted(found.items())]
        always = "no" if overload in native else "yes"
        lines.append(f"| `{overload}` | {always} | {'; '.join(texts).replace('|', chr(92) + '|')} |")
    return lines


def _bad(results: list[dict[str, Any]]) -> list[str]:
    lines = [
        "## Differences",
        "",
    ]
    begin = len(lines)
    for (runtime, dtype, how), records in _runs(results):
        for record in records:
            for detail, count in record["details"].items():
                if not detail.startswith(("not ", "more exact", "other ties")):
                    text = " ".join(detail.split())[:300]
                    lines.append(f"- `{record['operator']}`, {dtype}, {how}, {runtime}, {count} samples: {text}")
    return lines if len(lines) > begin else [*lines, "None."]


if __name__ == "__main__":
    raise SystemExit(main())
