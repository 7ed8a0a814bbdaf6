"""One run on a CUDA device, within ten minutes: is it right, and how fast is it?

    python -m bench.cuda --out cuda.json

Checks come first (numbers against float64, copies, streams, threads, memory, CUDA graphs), then ratios. A part that
fails costs the others nothing: its traceback is in the JSON, which is written after each part, and the status is 1 at
the end. `--device cpu --scale tiny` runs the same code without a device; its times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.cuda_checks import CHECKS, Found
from bench.cuda_device import Place
from bench.cuda_speed import SPEEDS

__all__ = ["PARTS", "about", "main", "run_parts", "table", "try_out"]

PARTS: dict[str, Callable[[Place], Found]] = {**CHECKS, **SPEEDS}
"""name -> part, in their order."""


def run_parts(
    parts: Mapping[str, Callable[[Place], Found]], place: Place, keep: Callable[[Mapping[str, Found]], None]
) -> dict[str, Found]:
    """Run parts, one after another, until the time is over.

    Args:
        parts: name -> part.
        place: where.
        keep: called after each part with all that was found so far.
    """
    found: dict[str, Found] = {}
    for name, part in parts.items():
        if time.monotonic() >= place.end:
            found[name] = {"ok": False, "error": "the time was over"}
            continue
        begin = time.monotonic()
        print(f"{name} ...", end=" ", flush=True)
        try:
            found[name] = part(place)
        except Exception as error:  # the parts after it are worth having
            found[name] = {"ok": False, "error": f"{type(error).__name__}: {error}", "at": traceback.format_exc()}
        found[name]["took"] = round(time.monotonic() - begin, 1)
        print("ok" if found[name]["ok"] else "FAILED", flush=True)
        _clean(place, found[name])
        keep(found)
    keep(found)
    return found


def _clean(place: Place, found: Found) -> None:
    try:
        place.clean()
    except Exception as error:  # after a fault on the device nothing works there any more, and each part says so
        found["ok"] = False
        found["error after it"] = f"{type(error).__name__}: {error}"


def table(found: Mapping[str, Found]) -> list[str]:
    """Format the findings: a line for each part, and one for each ratio."""
    lines = []
    for name, one in found.items():
        said = one.get("error", "").splitlines()[:1] or [_short(one)]
        lines.append(f"{'ok    ' if one['ok'] else 'FAILED'}  {name}: {said[0]}")
        for pair, spread in one.get("ratios", {}).items():
            lines.append(f"          {pair}: {spread['median']:.2f} [{spread['q1']:.2f} {spread['q3']:.2f}]")
        for contestant, reason in one.get("absent", {}).items():
            lines.append(f"          no {contestant}: {reason.splitlines()[0]}")
    return lines


def _short(one: Found) -> str:
    shown = {name: value for name, value in one.items() if name not in ("ok", "took", "ratios", "absent")}
    return ", ".join(f"{name} {_spelled(value)}" for name, value in shown.items())


def _spelled(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_spelled(inner)}" for name, inner in value.items()) + "}"
    return str(value)


def about(device: torch.device) -> dict[str, Any]:
    """Describe the device that is measured, and the releases."""
    from ort_dynamo.runtime.installed.capabilities import installed_runtime

    runtime = installed_runtime()
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "onnxruntime": f"{runtime.package} {runtime.version}",
        "python": platform.python_version(),
    }


def try_out(parser: argparse.ArgumentParser, keep: Callable[[], None]) -> None:
    """Write the file of `--out` before anything runs, or end: minutes of a device are not to be lost for a file."""
    try:
        keep()
    except OSError as error:
        parser.error(f"cannot write --out: {error}")


def main(given: Sequence[str] | None = None) -> int:
    """Run it.

    Returns:
        0, 1 if a part failed or was not reached, 2 without a device, or if the file cannot be written.
    """
    parser = argparse.ArgumentParser(prog="python -m bench.cuda", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda", help="default: cuda")
    parser.add_argument("--scale", choices=("tiny", "full"), default="full", help="of the models; default: full")
    parser.add_argument("--seconds", type=float, default=540, help="no part begins after that; default: 540")
    parser.add_argument("--only", default="", help="parts whose names contain this")
    parser.add_argument("--out", type=Path, default=Path("cuda.json"), help="default: cuda.json")
    arguments = parser.parse_args(given)
    device = torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("torch sees no CUDA device: --device cpu --scale tiny tries the code", file=sys.stderr)
        return 2
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        torch.cuda.set_device(device)
    os.environ.setdefault("ORT_DYNAMO_CACHE", "0")
    facts = about(device)

    def keep(found: Mapping[str, Found]) -> None:
        arguments.out.write_text(json.dumps({"about": facts, "scale": arguments.scale, "parts": found}, indent=1))

    try_out(parser, lambda: keep({}))
    parts = {name: part for name, part in PARTS.items() if arguments.only in name}
    place = Place(device, arguments.scale, time.monotonic() + arguments.seconds)
    found = run_parts(parts, place, keep)
    print("", *(f"{name}: {value}" for name, value in facts.items()), "", *table(found), sep="\n")
    return int(not found or not all(one["ok"] for one in found.values()))


if __name__ == "__main__":
    sys.exit(main())
