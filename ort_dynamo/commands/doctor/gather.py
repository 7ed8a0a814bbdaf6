"""Looks at the installed packages, and tries the devices that can be tried."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch

import ort_dynamo
from ort_dynamo.cache.folder import CacheFolder, FolderRefusedError
from ort_dynamo.commands.doctor.facts import CacheFacts, Facts, MachineFacts, Probe, RuntimeFacts
from ort_dynamo.errors import InvalidVariableError, OrtDynamoError
from ort_dynamo.options.cache_location import cache_location
from ort_dynamo.runtime.installed.capabilities import find_distributions
from ort_dynamo.runtime.installed.cuda_build import TorchCuda, installed_cuda_build, torch_cuda
from ort_dynamo.runtime.installed.importing import build_info, onnxruntime
from ort_dynamo.runtime.installed.providers import find_target

__all__ = ["gather"]

_VARIABLES = ("LOCAL_RANK", "OMP_NUM_THREADS", "TORCH_LOGS")
"""Environment variables of other packages that change a compile or its output."""

_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)(\[.*?\])?[>=]=(?P<oldest>[\w.]+)(?P<marker>.*)")
"""A pattern for a requirement of ours: `onnxruntime-gpu[cuda]>=1.28; extra == "cuda"`."""

_SECONDS = 120
"""A session of one node takes a hundredth; the rest is importing torch on a slow disk, and starting CUDA."""

_LIBRARY_ERROR = re.compile(r"with error: (?P<why>.+)")
"""A pattern for ONNX Runtime's log on stderr, which has the reason why a provider's library does not load."""


def gather() -> Facts:
    """Gather the facts of this process's environment."""
    runtime = _runtime()
    devices = tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    untried = runtime.error or len(runtime.distributions) > 1  # a compile refuses it, too
    tried = () if untried else ("cpu", *["cuda"] * bool(devices and runtime.cuda is not None))
    declared = importlib.metadata.requires("ort-dynamo") or ()
    requirements = [one for text in declared if (one := _REQUIREMENT.match(text))]
    torch_facts, torch_error = _torch()
    return Facts(
        python=platform.python_version(),
        packages=tuple((one["name"], _version(one["name"])) for one in requirements if not one["marker"]),
        torch=torch_facts,
        devices=devices,
        runtime=runtime,
        probes=tuple(try_device(device) for device in tried),
        cache=_cache(),
        machine=_machine(),
        fuses=_fuses() if "cuda" in tried else None,
        torch_error=torch_error,
        oldest=tuple((one["name"], one["oldest"]) for one in requirements),
    )


def _torch() -> tuple[TorchCuda, str]:
    """Return the CUDA libraries of torch, and why its cuDNN cannot be used."""
    try:
        return torch_cuda(), ""
    except RuntimeError as error:  # another cuDNN than that which torch was built with
        return TorchCuda(str(torch.__version__), torch.version.cuda, None), str(error).strip()


def _machine() -> MachineFacts:
    compilers = (os.environ.get("CXX", ""), "c++", "g++", "clang++", "cl")
    names = sorted(name for name in os.environ if name.startswith("ORT_DYNAMO_") or name in _VARIABLES)
    return MachineFacts(
        version=importlib.metadata.version("ort-dynamo"),
        path=str(Path(ort_dynamo.__file__).parent),
        system=platform.platform(),
        processor=f"{_processor()}, {os.cpu_count()} logical cores",
        compiler=next((path for name in compilers if name and (path := shutil.which(name))), ""),
        variables=tuple((name, os.environ[name]) for name in names),
    )


def _processor() -> str:
    with contextlib.suppress(OSError):  # platform.processor() knows nothing on most Linux systems
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _fuses() -> bool | None:
    try:
        return find_target("cuda").fuses_kernels
    except OrtDynamoError:  # the probe has the reason
        return None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _runtime() -> RuntimeFacts:
    distributions = tuple(find_distributions().items())
    try:
        module, says = onnxruntime(), build_info()
        providers, cuda = tuple(module.get_available_providers()), installed_cuda_build()
    except Exception as error:  # files of two builds raise any error: it is the answer
        return RuntimeFacts(distributions, None, "", (), None, f"{type(error).__name__}: {error}")
    path = str(Path(module.__file__).parent)
    return RuntimeFacts(distributions, (says.package_name, says.__version__), path, providers, cuda, "")


def try_device(device_type: str) -> Probe:
    """Run a session of one node in a process of its own: a library that does not fit can crash it."""
    command = [sys.executable, "-m", "ort_dynamo.runtime.installed.probe_device", device_type]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return Probe(device_type, f"it does not end within {_SECONDS} seconds")
    return Probe(device_type, explain(done.returncode, done.stdout, done.stderr))


def explain(status: int, out: str, err: str) -> str:
    """Explain the fault in a probe's process, by its output; "" if there is none."""
    if status == 0:
        return ""
    said = out.strip() or f"its process ended with status {status}, {(err.strip().splitlines() or ['silently'])[-1]}"
    why = _LIBRARY_ERROR.search(err)
    return f"{said} ({why['why'].strip()})" if why and why["why"].strip() not in said else said


def _cache() -> CacheFacts:
    try:
        in_use, place = cache_location() is not None, cache_location(True)
        assert place is not None
    except InvalidVariableError as error:
        return CacheFacts("", True, False, 0, 0, 0, str(error).removesuffix("."))
    entries, refused = [], ""
    try:
        entries = CacheFolder(place.path, place.max_bytes).entries()
    except (FolderRefusedError, OSError) as error:
        refused = str(error)
    there = next(path for path in (place.path, *place.path.parents) if path.exists())
    writable = os.access(there, os.W_OK | os.X_OK)
    size = sum(one.nbytes for one in entries)
    return CacheFacts(str(place.path), in_use, writable, len(entries), size, place.max_bytes, refused)
