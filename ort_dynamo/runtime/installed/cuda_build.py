"""Check whether ONNX Runtime's CUDA provider fits the CUDA libraries that are there: torch's, and nvidia's wheels."""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from ort_dynamo.runtime.installed.elf import dependencies
from ort_dynamo.runtime.installed.importing import build_info, onnxruntime

__all__ = [
    "REQUIREMENTS",
    "CudaBuild",
    "Misfit",
    "TorchCuda",
    "installed_cuda_build",
    "misfit",
    "replacing",
    "torch_cuda",
]

_PROVIDER = "libonnxruntime_providers_cuda.so"

_OF_CUDA = re.compile(r"lib(cu|nv)")
"""Name prefixes of CUDA's libraries: cudart, cublas, cublasLt, cudnn, cufft, curand, nvrtc."""


@dataclass(frozen=True)
class CudaBuild:
    """The CUDA provider of a build of ONNX Runtime.

    Attributes:
        version: the CUDA version that the build names, such as "13.0"; "" if it names none.
        libraries: the names of CUDA's libraries that the provider's file needs.
        missing: the libraries that do not load.
    """

    version: str
    libraries: tuple[str, ...]
    missing: tuple[str, ...]

    @property
    def cuda(self) -> int | None:
        """The major version of CUDA, from the libraries' names, or else from the build."""
        named = self._named(r"lib(?:cudart|cublas|cublasLt)\.so\.(\d+)")
        return _major(self.version) if named is None else named

    @property
    def cudnn(self) -> int | None:
        """The major version of cuDNN; None where the file does not need it."""
        return self._named(r"libcudnn\.so\.(\d+)")

    def _named(self, pattern: str) -> int | None:
        found = (re.match(pattern, name) for name in self.libraries)
        return next((int(match[1]) for match in found if match), None)

    def __str__(self) -> str:
        cuda = self.version or self.cuda
        named = [("CUDA", cuda), ("cuDNN", self.cudnn)]
        return " and ".join(f"{name} {version}" for name, version in named if version is not None)


@dataclass(frozen=True)
class TorchCuda:
    """The CUDA libraries of torch.

    Attributes:
        torch: torch's version.
        version: the CUDA version, such as "13.0"; None for a build without CUDA.
        cudnn_version: the version as torch encodes it, such as 92600 or, before cuDNN 9, 8902; None without cuDNN.
    """

    torch: str
    version: str | None
    cudnn_version: int | None

    @property
    def cuda(self) -> int | None:
        """The major version of CUDA."""
        return _major(self.version or "")

    @property
    def cudnn(self) -> int | None:
        """The major version of cuDNN."""
        number = self.cudnn_version
        return None if number is None else number // (10000 if number >= 10000 else 1000)

    def __str__(self) -> str:
        cudnn = "" if self.cudnn is None else f" and cuDNN {self.cudnn}"
        return f"CUDA {self.version}{cudnn}" if self.version else "no CUDA"


@dataclass(frozen=True)
class Misfit:
    """The reason why the provider cannot load, and the fix.

    Attributes:
        reason: a clause.
        fix: a command, or advice.
    """

    reason: str
    fix: str


def misfit(build: CudaBuild, torch_has: TorchCuda, package: str) -> Misfit | None:
    """Explain why a provider cannot load beside a torch; None if all its libraries are there.

    Versions that differ from torch's are no reason by themselves: CUDA's libraries have their version in their names,
    so two versions can be in one process.

    Args:
        build: the provider.
        torch_has: the versions that torch brings.
        package: the distribution that the provider belongs to.
    """
    if not build.missing:
        return None
    lacks = f"{', '.join(build.missing)} {'is' if len(build.missing) == 1 else 'are'} not found"
    numbers = [(build.cuda, torch_has.cuda), (build.cudnn, torch_has.cudnn)]
    differ = [(mine, theirs) for mine, theirs in numbers if mine is not None and theirs is not None and mine != theirs]
    if not differ:
        return Misfit(f"{lacks}, which it needs", replacing([], "cuda"))
    reason = f"{package} was built for {build}, and torch {torch_has.torch} brings {torch_has}: {lacks}"
    if differ[0][0] > differ[0][1]:
        return Misfit(reason, "pip install --upgrade --force-reinstall torch")  # PyPI's is of the newest CUDA
    return Misfit(reason, replacing([package], "cuda"))


REQUIREMENTS = {
    "cpu": "onnxruntime>=1.28",
    "cuda": "onnxruntime-gpu[cuda,cudnn]>=1.28",
    "training": "onnxruntime-training==1.19.2",
}
"""Extra of this project -> its distribution of ONNX Runtime, which pip finds without this project."""


def replacing(packages: Iterable[str], extra: str) -> str:
    """Return the commands that replace these distributions by the runtime of an extra.

    The distributions share a folder, and pip would leave files that one of them overwrote. So all are removed first.
    """
    uninstall = " ".join(packages)
    return f"{f'pip uninstall -y {uninstall} && ' if uninstall else ''}pip install --upgrade '{REQUIREMENTS[extra]}'"


@lru_cache(maxsize=1)
def installed_cuda_build() -> CudaBuild | None:
    """Find the installed runtime's CUDA provider, and load the libraries that are found; None without one.

    ONNX Runtime leaves them to the loader, which knows those that torch has loaded. Libraries that torch does without,
    as curand, are in the wheels that the extra `cuda` installs, where the loader does not look.
    """
    module = onnxruntime()
    if "CUDAExecutionProvider" not in module.get_available_providers():
        return None
    version = str(getattr(build_info(), "cuda_version", ""))
    path = Path(module.__file__).parent / "capi" / _PROVIDER
    asks = dependencies(path) if path.is_file() else None
    if asks is None:  # the provider of another system, or one that is linked in
        return CudaBuild(version, (), ())
    libraries = tuple(name for name in asks.needed if _OF_CUDA.match(name))
    wheels = sorted({str(found) for place in sys.path for found in Path(place).glob("nvidia/*/lib")})
    return CudaBuild(version, libraries, load_libraries(libraries, [*asks.folders, *wheels]))


def load_libraries(names: Iterable[str], folders: Iterable[str]) -> tuple[str, ...]:
    """Load shared libraries by name, or from one of the folders; give the names of those that do not load.

    Libraries may need each other, so it repeats until a round loads none.
    """
    left = list(names)
    searched = [Path(folder) for folder in folders]
    while left:
        failed = [name for name in left if not any(map(_loads, [name, *_files(name, searched)]))]
        if len(failed) in (0, len(left)):
            return tuple(failed)
        left = failed
    return ()


def _files(name: str, folders: Iterable[Path]) -> list[str]:
    return [str(folder / name) for folder in folders if (folder / name).is_file()]


def _loads(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def torch_cuda() -> TorchCuda:
    """Find the versions of the installed torch, and of its CUDA and cuDNN."""
    cudnn: Any = torch.backends.cudnn
    return TorchCuda(str(torch.__version__), torch.version.cuda, cudnn.version())


def _major(version: str) -> int | None:
    found = re.match(r"\d+", version)
    return int(found[0]) if found else None
