"""What the installed ONNX Runtime can do, asked by its package name and version.

Never by trial: some gradient operators crash the process when a session with them is opened.
"""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

import onnx_ir as ir

from ort_dynamo.errors import RuntimeNotInstalledError, SeveralRuntimesError
from ort_dynamo.runtime.importing import binding
from ort_dynamo.target import OPSET, KernelTable, release

__all__ = [
    "TESTED_RUNTIMES",
    "InstalledRuntime",
    "installed_runtime",
    "kernel_table",
    "omitted_optimizers",
    "recorded_kernel_table",
    "waiting_threads",
]

_TRAINING = "onnxruntime-training"

# All distributions on PyPI that provide the import name `onnxruntime`.
_DISTRIBUTIONS = (
    "onnxruntime",
    "onnxruntime-gpu",
    _TRAINING,
    "onnxruntime-directml",
    "onnxruntime-openvino",
    "onnxruntime-qnn",
    "onnxruntime-rocm",
    "onnxruntime-migraphx",
)

# com.microsoft gradient operators with a float CPU and CUDA kernel in the training build, seen to agree with
# torch. The list leaves out operators that crash without shapes (MaxPoolGrad, AveragePoolGrad).
_GRADIENT_KERNELS = (
    "ConvGrad",
    "GeluGrad",
    "LayerNormalizationGrad",
    "ReluGrad",
    "SigmoidGrad",
    "SoftmaxGrad_13",
    "TanhGrad",
)


_FUSIONS_WITHOUT_DOUBLE = (
    "MatmulTransposeFusion",
    "MatMulScaleFusion",
    "GeluFusion",
    "GeluFusionL1",
    "GeluFusionL2",
    "FastGeluFusion",
    "QuickGeluFusion",
    "BiasGeluFusion",
)


@dataclass(frozen=True)
class InstalledRuntime:
    """The one installed ONNX Runtime distribution."""

    package: str
    version: str

    @property
    def has_gradient_kernels(self) -> bool:
        """Whether this is the training build."""
        return self.package == _TRAINING


def find_distributions() -> dict[str, str]:
    """Installed distributions that provide `onnxruntime`: name -> version."""
    found: dict[str, str] = {}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


@lru_cache(maxsize=1)
def installed_runtime() -> InstalledRuntime:
    """The installed runtime.

    Raises:
        RuntimeNotInstalledError: none is installed.
        SeveralRuntimesError: more than one is installed.
    """
    found = find_distributions()
    if not found:
        try:
            # A build unpacked on the path has no distribution metadata; it says what it is itself.
            from onnxruntime.capi import build_and_package_info as info
        except ImportError as error:
            raise RuntimeNotInstalledError from error
        return InstalledRuntime(info.package_name, info.__version__)
    if len(found) > 1:
        raise SeveralRuntimesError(
            found=", ".join(f"{name} {version}" for name, version in found.items()), uninstall=" ".join(found)
        )
    ((package, version),) = found.items()
    return InstalledRuntime(package, version)


@lru_cache(maxsize=4)
def kernel_table(runtime: InstalledRuntime, provider: str) -> KernelTable:
    """Which dtypes the kernels of `provider` take, at this project's opset and in com.microsoft.

    The stock builds answer themselves. The training build has no such call, so its CPU kernels come from a table
    read off the stock build of the same version, plus the gradient operators. For its CUDA provider, which cannot
    be asked either, the CPU table stands in.
    """
    entries = _recorded_kernels("1.19.2") if runtime.has_gradient_kernels else _asked_kernels(provider)
    return _table(entries, runtime)


@lru_cache(maxsize=2)
def recorded_kernel_table(runtime: InstalledRuntime) -> KernelTable:
    """The CPU kernels of one of the two tested runtimes, read from a record: the same whatever is installed."""
    return _table(_recorded_kernels(runtime.version), runtime)


TESTED_RUNTIMES = (InstalledRuntime(_TRAINING, "1.19.2"), InstalledRuntime("onnxruntime", "1.31.1"))
"""The runtimes that the tests run on, each with a record of its CPU kernels."""


def _table(entries: Iterable[tuple[str, str, dict[str, list[str]]]], runtime: InstalledRuntime) -> KernelTable:
    table: dict[tuple[str, str], tuple[dict[str, frozenset[ir.DataType]], ...]] = {}
    for domain, op_type, constraints in entries:
        kernel = {variable: _parse(types) for variable, types in constraints.items()}
        table[domain, op_type] = (*table.get((domain, op_type), ()), kernel)
    if runtime.has_gradient_kernels:
        for op_type in _GRADIENT_KERNELS:
            table["com.microsoft", op_type] = ({"T": frozenset({ir.DataType.FLOAT})},)
    return table


_MOVES_TRANSPOSES = ("TransposeOptimizer", "TransposeOptimizer_CPUExecutionProvider")
"""These move a transpose through a sum where nobody else reads what is between. So the last bits of a gradient would
depend on what is recomputed. Our transposes are attributes of products, and steps take the same time without them."""


def omitted_optimizers(dtypes: Collection[ir.DataType]) -> list[str]:
    """ONNX Runtime's own graph optimizers that are left out for a model with values of `dtypes`.

    Those that move transposes would break the promise that recomputation changes no bit. Those for float64 make contrib
    operators of float64 nodes without asking whether a float64 kernel exists. In the training build, NoopElimination
    takes an empty constant for a zero and loses the output of a sum with it.
    """
    omitted = [*_MOVES_TRANSPOSES, *(_FUSIONS_WITHOUT_DOUBLE if ir.DataType.DOUBLE in dtypes else ())]
    return [*omitted, "NoopElimination"] if installed_runtime().has_gradient_kernels else omitted


_BOUNDS_SPINNING = (1, 31)
"""The version of ONNX Runtime from which "session.intra_op.spin_duration_us" is used, the oldest that was measured."""


def waiting_threads() -> dict[str, str]:
    """Session settings, without the prefix "session.", for the threads of a CPU session that wait for an operator.

    Waking a thread takes longer than a small operator, so they spin, but for 20 µs only, and never between runs:
    torch's threads and other processes want the cores. On two cores this takes 4 to 8 % off training steps, and costs
    nothing beside a busy process, where ONNX Runtime's own spinning, about a millisecond, makes them half as long
    again. Versions that cannot bound it do not spin.
    """
    if release(installed_runtime().version) < _BOUNDS_SPINNING:
        return {"intra_op.allow_spinning": "0"}
    return {"intra_op.allow_spinning": "1", "intra_op.spin_duration_us": "20", "force_spinning_stop": "1"}


def _asked_kernels(provider: str) -> Iterable[tuple[str, str, dict[str, list[str]]]]:
    for kernel in binding().get_all_opkernel_def():
        first, last = kernel.version_range
        if kernel.provider != provider or kernel.domain not in ("", "ai.onnx", "com.microsoft"):
            continue
        if kernel.domain == "com.microsoft":
            yield kernel.domain, kernel.op_name, kernel.type_constraints
        elif first <= OPSET <= last:
            yield "", kernel.op_name, kernel.type_constraints


def _recorded_kernels(version: str) -> Iterable[tuple[str, str, dict[str, list[str]]]]:
    text = (files("ort_dynamo.runtime") / f"kernels_{version}_cpu.json").read_text()
    kernels: dict[str, list[dict[str, Any]]] = json.loads(text)
    for name, entries in kernels.items():
        domain, op_type = name.split("::")
        for constraints in entries:
            yield domain, op_type, constraints


def _parse(types: Iterable[str]) -> frozenset[ir.DataType]:
    names = (name.removeprefix("tensor(").removesuffix(")") for name in types if not name.startswith("seq"))
    return frozenset(ir.DataType[name.upper()] for name in names if name.upper() in ir.DataType.__members__)
