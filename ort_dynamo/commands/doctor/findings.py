"""Find problems in the recorded facts, each with its fix."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from ort_dynamo.commands.doctor.facts import Facts, RuntimeFacts
from ort_dynamo.runtime.installed.cuda_build import misfit, replacing
from ort_dynamo.targets.target import TRAINING_PACKAGE

__all__ = ["Finding", "findings"]

_CUDA = "CUDAExecutionProvider"


@dataclass(frozen=True)
class Finding:
    """A problem or a note for the user.

    Attributes:
        what: a sentence.
        fix: a command, or advice.
        is_fault: whether it is a problem; else it is a note on why something installed is not used.
    """

    what: str
    fix: str
    is_fault: bool = True


def findings(facts: Facts) -> tuple[Finding, ...]:
    """All findings, first those that others may follow from."""
    runtime = tuple(_runtime(facts))
    # If the files are of two builds, or of none, no other check makes sense.
    sessions = () if runtime else (*_cpu(facts), *_cuda(facts))
    return (*_packages(facts), *runtime, *sessions, *_cache(facts))


def _packages(facts: Facts) -> Iterator[Finding]:
    missing = [name for name, version in facts.packages if version is None]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        yield Finding(f"{', '.join(missing)} {verb} not installed.", f"pip install {' '.join(missing)}")
    if facts.torch_error:
        same = f"pip install --force-reinstall torch=={facts.torch.torch.partition('+')[0]}"
        yield Finding(f"torch {facts.torch.torch} cannot use its cuDNN: {facts.torch_error}", same)
    oldest = dict(facts.oldest)
    runtimes = facts.runtime.distributions
    for name, version in (*facts.packages, *(runtimes if len(runtimes) == 1 else ())):  # else all are to be replaced
        if version is not None and name in oldest and _numbers(version) < _numbers(oldest[name]):
            what = f"{name} {version} is installed, but ort_dynamo needs {oldest[name]} or newer."
            yield Finding(what, f"pip install --upgrade '{name}>={oldest[name]}'")


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a release, to be compared: 2.13.0 of "2.13.0+cpu", without zeros at its end."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, re.sub(r"(\.0+)+$", "", found[0]).split("."))) if found else ()


def _runtime(facts: Facts) -> Iterator[Finding]:
    runtime = facts.runtime
    names = [name for name, _ in runtime.distributions]
    put_right = replacing(names, _extra(facts))
    if len(names) > 1:
        listed = ", ".join(f"{name} {version}" for name, version in runtime.distributions)
        what = f"Several distributions of ONNX Runtime are installed ({listed}), which overwrite one another's files"
        yield Finding(f"{what}{_now_of(runtime)}.", put_right)
    elif not names and runtime.error:
        yield Finding("ONNX Runtime is not installed.", put_right)
    elif runtime.error:
        yield Finding(f"{_installed(runtime)} is installed, but does not import: {runtime.error}.", _again(facts))
    elif names and runtime.says is not None and _plain(runtime.says) != _plain(runtime.distributions[0]):
        what = f"{_installed(runtime)} is installed, but its files are those of {' '.join(runtime.says)}"
        yield Finding(f"{what}: another distribution was installed over it.", put_right)


def _cpu(facts: Facts) -> Iterator[Finding]:
    for probe in facts.probes:
        if probe.on == "cpu" and probe.said:
            yield Finding(f"A session on the CPU does not run: {probe.said}.", _again(facts))


def _cuda(facts: Facts) -> Iterator[Finding]:
    runtime, torch = facts.runtime, facts.torch
    if not facts.devices:
        yield from _no_device(facts)
        return
    devices = f"torch sees {', '.join(facts.devices)}"
    if _CUDA not in runtime.providers:
        what = f"{devices}, but {_installed(runtime)} has no {_CUDA}: models on CUDA cannot be compiled"
        yield Finding(f"{what}.", replacing([name for name, _ in runtime.distributions], "cuda"))
        return
    found = None if runtime.cuda is None else misfit(runtime.cuda, torch, _named(runtime)[0])
    if found is not None:
        yield Finding(f"{_CUDA} cannot load: {found.reason}.", found.fix)
        return
    for probe in facts.probes:
        if probe.on == "cuda" and probe.said:
            built = "" if runtime.cuda is None or not str(runtime.cuda) else f", which is built for {runtime.cuda}"
            what = f"A session on CUDA does not run, though the libraries of {_installed(runtime)}{built}, are there"
            fix = "nvidia-smi prints the newest CUDA version that the driver runs: update the driver if it is older"
            yield Finding(f"{what}: {probe.said}.", fix)


def _no_device(facts: Facts) -> Iterator[Finding]:
    if facts.torch.version is not None:
        what = f"torch {facts.torch.torch} is built for CUDA {facts.torch.version}, but sees no CUDA device."
        fix = "Check with nvidia-smi whether the driver sees one. To train on the CPU, do nothing"
        yield Finding(what, fix, is_fault=False)
    elif _CUDA in facts.runtime.providers and _named(facts.runtime)[0] != TRAINING_PACKAGE:
        what = f"{_installed(facts.runtime)} has {_CUDA}, but torch {facts.torch.torch} is a build without CUDA."
        fix = "To train on CUDA: pip install --upgrade --force-reinstall torch. To train on the CPU, do nothing"
        yield Finding(what, fix, is_fault=False)


def _cache(facts: Facts) -> Iterator[Finding]:
    cache = facts.cache
    elsewhere = "Set ORT_DYNAMO_CACHE_DIR to a folder of your own, or ORT_DYNAMO_CACHE=0"
    if cache.in_use and cache.error:
        yield Finding(f"The cache of compiled graphs is not used: {cache.error}.", elsewhere)
    elif cache.in_use and not cache.writable:
        yield Finding(f"The cache of compiled graphs cannot be written: {cache.path}.", elsewhere)


def _installed(runtime: RuntimeFacts) -> str:
    return " ".join(_named(runtime)).strip()


def _named(runtime: RuntimeFacts) -> tuple[str, str]:
    return runtime.distributions[0] if runtime.distributions else runtime.says or ("onnxruntime", "")


def _now_of(runtime: RuntimeFacts) -> str:
    return f"; `import onnxruntime` loads {' '.join(runtime.says)}" if runtime.says else ""


def _plain(named: tuple[str, str]) -> tuple[str, str]:
    """Name and version as they can be compared, with any separators of pip and the build between a name's words."""
    name, version = named
    return re.sub(r"[-_.]+", "-", name).lower(), version.partition("+")[0]


def _extra(facts: Facts) -> str:
    """Return the extra for this machine: an installed one is kept where it serves."""
    if facts.devices:
        return "cuda"
    return "training" if [name for name, _ in facts.runtime.distributions] == [TRAINING_PACKAGE] else "cpu"


def _again(facts: Facts) -> str:
    """Return the command that installs the same anew."""
    again = " ".join(f"{name}=={version}" for name, version in facts.runtime.distributions)
    return f"pip install --force-reinstall --no-deps {again}" if again else replacing([], _extra(facts))
