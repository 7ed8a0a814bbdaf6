"""The facts that the doctor checks, as values, so that findings can be tested for any machine."""

from __future__ import annotations

from dataclasses import dataclass

from ort_dynamo.runtime.installed.cuda_build import CudaBuild, TorchCuda

__all__ = ["CacheFacts", "Facts", "MachineFacts", "Probe", "RuntimeFacts"]


@dataclass(frozen=True)
class RuntimeFacts:
    """The module `onnxruntime`.

    Attributes:
        distributions: (name, version) of those installed that provide it; more than one overwrite one another's files.
        says: (name, version) that its files say; None where it does not import.
        path: its folder; "" where it does not import.
        providers: execution providers of the build, whether or not they load.
        cuda: its CUDA provider, if it has one.
        error: the error of its import; "" where it imports.
    """

    distributions: tuple[tuple[str, str], ...]
    says: tuple[str, str] | None
    path: str
    providers: tuple[str, ...]
    cuda: CudaBuild | None
    error: str


@dataclass(frozen=True)
class Probe:
    """A session of one node, tried in a process of its own.

    Attributes:
        on: "cpu" or "cuda".
        said: the failure, in words; "" where it ran, and its result was right.
    """

    on: str
    said: str


@dataclass(frozen=True)
class CacheFacts:
    """The folder of compiled graphs.

    Attributes:
        path: its path, which may not exist yet.
        in_use: whether compiles use it (ORT_DYNAMO_CACHE).
        writable: whether files in it, or the folder, can be created.
        entries: the number of entries.
        nbytes: their size.
        max_bytes: the maximum size.
        error: why it cannot be used; "" if it can.
    """

    path: str
    in_use: bool
    writable: bool
    entries: int
    nbytes: int
    max_bytes: int
    error: str


@dataclass(frozen=True)
class MachineFacts:
    """The machine, and this package on it.

    Attributes:
        version: the version of ort_dynamo.
        path: the folder that it is imported from.
        system: the operating system.
        processor: its name, with the number of logical cores.
        compiler: the path of a C++ compiler; "" if none is found.
        variables: (name, value) of the environment variables that change compiles, as far as they are set.
    """

    version: str
    path: str
    system: str
    processor: str
    compiler: str
    variables: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Facts:
    """All facts.

    Attributes:
        python: the version of Python.
        packages: (name, version) of the packages needed beside ONNX Runtime; None for one that is not installed.
        torch_error: why torch cannot use the cuDNN that it finds; "" if it can, or finds none.
        oldest: (name, version) of the oldest version that ort_dynamo takes of each package, ONNX Runtime's among them.
        torch: the CUDA libraries of torch.
        devices: names of the CUDA devices that torch sees.
        runtime: the module `onnxruntime`.
        probes: the sessions that were tried; none if the module does not import, or several distributions provide it.
        cache: the folder of compiled graphs.
        machine: the machine, and this package on it.
        fuses: whether sessions on CUDA launch fused kernels; None without such sessions.
    """

    python: str
    packages: tuple[tuple[str, str | None], ...]
    torch: TorchCuda
    devices: tuple[str, ...]
    runtime: RuntimeFacts
    probes: tuple[Probe, ...]
    cache: CacheFacts
    machine: MachineFacts
    fuses: bool | None = None
    torch_error: str = ""
    oldest: tuple[tuple[str, str], ...] = ()
