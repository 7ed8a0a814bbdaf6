"""Capabilities of the installed ONNX Runtime, found by its package name and version.

Never by a probe: some gradient operators crash the process when a session with them is opened.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

import onnx_ir as ir
import torch

from ort_dynamo.errors import RuntimeNotInstalledError, SeveralRuntimesError
from ort_dynamo.runtime.binding import kernel_definitions
from ort_dynamo.runtime.installed.cuda_build import replacing
from ort_dynamo.runtime.installed.importing import onnxruntime
from ort_dynamo.targets.target import OPSET, TRAINING_PACKAGE, KernelTable, Target
from ort_dynamo.torch_internals.kernels.processor import instruction_set
from ort_dynamo.torch_internals.release import release, say_if_newer

__all__ = [
    "TESTED_RUNTIMES",
    "InstalledRuntime",
    "installed_runtime",
    "kernel_table",
    "nearest_record",
    "omitted_optimizers",
    "recorded_kernel_table",
    "runtime_facts",
    "say_if_untested",
    "waiting_threads",
]

_log = logging.getLogger(__name__)

# All distributions on PyPI that provide the import name `onnxruntime`.
_DISTRIBUTIONS = (
    "onnxruntime",
    "onnxruntime-gpu",
    TRAINING_PACKAGE,
    "onnxruntime-directml",
    "onnxruntime-openvino",
    "onnxruntime-qnn",
    "onnxruntime-rocm",
    "onnxruntime-migraphx",
)

# com.microsoft gradient operators with a float CPU and CUDA kernel in the training build, seen to agree with
# torch. MaxPoolGrad and AveragePoolGrad are left out: defect gradients_without_shapes.
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
        """True if this is the training build."""
        return self.package == TRAINING_PACKAGE

    @property
    def bounds_spinning(self) -> bool:
        """True if "session.intra_op.spin_duration_us" is used: from the oldest release in which it was measured."""
        return release(self.version) >= (1, 31)


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
    """Return the installed runtime.

    Raises:
        RuntimeNotInstalledError: none is installed.
        SeveralRuntimesError: more than one is installed.
    """
    found = find_distributions()
    if not found:
        try:
            # A build unpacked on the path has no distribution metadata; it gives its own name and version.
            from onnxruntime.capi import build_and_package_info as info
        except ImportError as error:
            raise RuntimeNotInstalledError from error
        return InstalledRuntime(info.package_name, info.__version__)
    if len(found) > 1:
        extra = "cuda" if torch.cuda.is_available() else "training" if TRAINING_PACKAGE in found else "cpu"
        listed = ", ".join(f"{name} {version}" for name, version in found.items())
        raise SeveralRuntimesError(found=listed, fix=replacing(found, extra))
    ((package, version),) = found.items()
    return InstalledRuntime(package, version)


@lru_cache(maxsize=1)
def runtime_facts() -> tuple[str, ...]:
    """Give the facts, beside options, that the bytes of an optimized model depend on.

    They are the build of ONNX Runtime and the processor: its optimizers choose the blocks of convolutions by the
    vectors that the processor has.
    """
    runtime = installed_runtime()
    build = getattr(onnxruntime(), "get_build_info", lambda: "")()
    return f"{runtime.package} {runtime.version} {build}", instruction_set()


@lru_cache(maxsize=4)
def kernel_table(runtime: InstalledRuntime, provider: str) -> KernelTable:
    """Give the dtypes that the kernels of `provider` take, at this project's opset and in com.microsoft.

    Stock builds list their kernels by a call. The training build has no such call: its kernels come from a record of
    the stock build of the same version (.ci/record_kernels.py), plus the gradient operators. A stock build without the
    call gets the kernels of the nearest recorded release. So does a build with TensorRT's provider: the call makes
    each provider, and that one ends the process if TensorRT's libraries are missing.
    """
    has_tensorrt = "TensorrtExecutionProvider" in onnxruntime().get_available_providers()
    definitions = None if has_tensorrt else kernel_definitions()
    if definitions is None:
        return _table(_recorded_kernels(nearest_record(runtime.version), provider), runtime)
    return _table(_asked_kernels(definitions, provider), runtime)


def nearest_record(version: str) -> str:
    """Return the version of the recorded kernel table whose release is nearest to that of `version`."""
    major, minor = release(version)
    records = (runtime.version for runtime in TESTED_RUNTIMES)
    return min(records, key=lambda record: abs((release(record)[0] - major) * 1000 + release(record)[1] - minor))


@lru_cache(maxsize=4)
def recorded_kernel_table(runtime: InstalledRuntime, provider: str) -> KernelTable:
    """Return the kernels of one of TESTED_RUNTIMES, read from a record: the same for any installed runtime."""
    return _table(_recorded_kernels(runtime.version, provider), runtime)


TESTED_RUNTIMES = (InstalledRuntime(TRAINING_PACKAGE, "1.19.2"), InstalledRuntime("onnxruntime", "1.31.1"))
"""A release of each of the two builds that CI runs the tests on, with a record of the kernels of the CPU and of
CUDA, which onnxruntime-gpu has."""

NEWEST_TESTED = "1.32"
"""The newest release of ONNX Runtime that the tests passed on (docs/reference/versions.md)."""


@lru_cache(maxsize=1)
def say_if_untested() -> None:
    """Log once per process that the installed runtime is newer than any tested one; it is never refused for that."""
    runtime = installed_runtime()
    say_if_newer(_log, runtime.package, runtime.version, NEWEST_TESTED)


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
"""Our transposes are attributes of matmuls, and steps take the same time without these optimizers."""


_FUSIONS_OF_NORMS = (
    "SkipLayerNormFusion",
    "BiasSkipLayerNormFusion",
    "LayerNormFusion",
    "EmbedLayerNormFusion",
    "AttentionFusion",
)
"""Our layer norms are one node already. The other fusions replace layers of inference graphs by contrib operators,
whose optional outputs and masks differ from those of the replaced nodes."""


def omitted_optimizers(dtypes: Collection[ir.DataType], target: Target) -> list[str]:
    """ONNX Runtime's own graph optimizers that are left out for a model with values of `dtypes`: they have defects."""
    omitted = ["NoopElimination"]  # defect noop_elimination_loses_signs
    if target.has_defect("transposes_are_moved"):  # recomputation changes no bit
        omitted += _MOVES_TRANSPOSES
    if target.has_defect("fusions_without_double") and ir.DataType.DOUBLE in dtypes:
        omitted += _FUSIONS_WITHOUT_DOUBLE
    if target.has_defect("fused_norms_without_statistics"):
        omitted += _FUSIONS_OF_NORMS
    if target.has_defect("optimizers_read_empty_constants"):
        omitted.append("DivMulFusion")
    if target.has_defect("conv_fusion_reads_inputs_of_if"):
        omitted.append("ConvActivationFusion")
    if target.has_defect("rules_lose_edges"):
        omitted += ("PreShapeNodeElimination", "DivMulFusion")
    return omitted


def waiting_threads() -> dict[str, str]:
    """Session settings, without the prefix "session.", for the threads of a CPU session that wait for an operator.

    Waking a thread takes longer than a small operator, so they spin, but for 20 µs only, and never between runs:
    torch's threads and other processes want the cores. On two cores this takes 4 to 8 % off training steps, and costs
    nothing beside a busy process, where ONNX Runtime's own spinning, about a millisecond, makes them half as long
    again. Versions that cannot bound it do not spin.
    """
    if not installed_runtime().bounds_spinning:
        return {"intra_op.allow_spinning": "0"}
    return {"intra_op.allow_spinning": "1", "intra_op.spin_duration_us": "20", "force_spinning_stop": "1"}


def _asked_kernels(definitions: Iterable[Any], provider: str) -> Iterable[tuple[str, str, dict[str, list[str]]]]:
    for kernel in definitions:
        first, last = kernel.version_range
        if kernel.provider != provider or kernel.domain not in ("", "ai.onnx", "com.microsoft"):
            continue
        if kernel.domain == "com.microsoft":
            yield kernel.domain, kernel.op_name, kernel.type_constraints
        elif first <= OPSET <= last:
            yield "", kernel.op_name, kernel.type_constraints


def _recorded_kernels(version: str, provider: str) -> Iterable[tuple[str, str, dict[str, list[str]]]]:
    device = provider.removesuffix("ExecutionProvider").lower()
    text = (files("ort_dynamo.runtime") / f"kernels_{version}_{device}.json").read_text()
    kernels: dict[str, list[dict[str, Any]]] = json.loads(text)
    for name, entries in kernels.items():
        domain, op_type = name.split("::")
        for constraints in entries:
            yield domain, op_type, constraints


def _parse(types: Iterable[str]) -> frozenset[ir.DataType]:
    names = (name.removeprefix("tensor(").removesuffix(")") for name in types if not name.startswith("seq"))
    return frozenset(ir.DataType[name.upper()] for name in names if name.upper() in ir.DataType.__members__)
