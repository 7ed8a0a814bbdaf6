"""Facts and findings, as text for people and as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence

from ort_dynamo.commands.doctor.facts import Facts
from ort_dynamo.commands.doctor.findings import Finding

__all__ = ["as_json", "as_text"]


def as_text(facts: Facts, found: Sequence[Finding]) -> str:
    """Return the facts, then the findings, each with its fix."""
    lines = ["Installed", *_table(_installed(facts)), "", "Runs", *_table(_runs(facts))]
    faults, notes = [one for one in found if one.is_fault], [one for one in found if not one.is_fault]
    lines += ["", "Wrong" if faults else "Nothing is wrong."]
    for title, listed in (("", faults), ("Also", notes)):
        if title and listed:
            lines += ["", title]
        for one in listed:
            lines += [f"  {one.what}", f"    {one.fix}"]
    return "\n".join(lines)


def as_json(facts: Facts, found: Sequence[Finding]) -> str:
    """Return the same, for programs: {"facts": …, "findings": […], "ok": …}."""
    return json.dumps(
        {
            "ok": not any(one.is_fault for one in found),
            "facts": dataclasses.asdict(facts),
            "findings": [dataclasses.asdict(one) for one in found],
        },
        indent=2,
    )


def _table(rows: Iterator[tuple[str, str]]) -> list[str]:
    listed = list(rows)
    width = max(len(name) for name, _ in listed)
    return [f"  {name:<{width}}  {value}" for name, value in listed]


def _installed(facts: Facts) -> Iterator[tuple[str, str]]:
    machine = facts.machine
    yield "ort_dynamo", f"{machine.version}, in {machine.path}"
    yield "system", machine.system
    yield "processor", machine.processor
    yield "C++ compiler", machine.compiler or "not found: only torch's inductor and fused kernels need one"
    yield "environment", ", ".join(f"{name}={value}" for name, value in machine.variables) or "no variable is set"
    yield "Python", facts.python
    for name, version in facts.packages:
        built_for = f", {facts.torch if facts.torch.version else 'cpu'}" if name == "torch" and version else ""
        yield name, f"{version}{built_for}" if version else "not installed"
    runtime = facts.runtime
    yield "distributions", ", ".join(f"{name} {version}" for name, version in runtime.distributions) or "none known"
    if runtime.says is None:
        yield "onnxruntime", f"does not import: {runtime.error}"
        return
    yield "onnxruntime", f"{runtime.says[1]}, built as {runtime.says[0]}, in {runtime.path}"
    yield "providers", ", ".join(runtime.providers)
    if runtime.cuda is not None:
        missing = f"; {', '.join(runtime.cuda.missing)} not found" if runtime.cuda.missing else ""
        yield "CUDA provider", f"built for {runtime.cuda}{missing}"


def _runs(facts: Facts) -> Iterator[tuple[str, str]]:
    tried = {probe.on: f"no: {probe.said}" if probe.said else "yes: a session ran" for probe in facts.probes}
    why_not = "" if facts.devices else ": torch sees no device"
    yield "CPU", tried.get("cpu", "not tried")
    yield "CUDA", tried.get("cuda", f"not tried{why_not}")
    if facts.fuses is not None:
        yield "fused kernels", "yes, on CUDA" if facts.fuses else "no: ONNX Runtime's own kernels run on CUDA"
    yield "CUDA devices", ", ".join(facts.devices) or "none"
    cache = facts.cache
    if cache.error:
        yield "cache", f"no: {cache.error}"
        return
    use = "" if cache.in_use else "off (ORT_DYNAMO_CACHE is 0), "
    write = "writable" if cache.writable else "not writable"
    size = f"{cache.nbytes / 2**20:.1f} MiB of {cache.max_bytes / 2**20:.0f} MiB"
    yield "cache", f"{use}{cache.path}, {write}, {cache.entries} entries, {size}"
