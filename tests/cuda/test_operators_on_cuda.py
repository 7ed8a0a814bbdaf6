"""Each operator of PyTorch's database that runs in ONNX Runtime on the CPU does so on CUDA, with named exceptions."""

from __future__ import annotations

import pytest
from exceptions_on_cuda import EXCEPTIONS, REASONS, exceptions
from operators_on_cuda import NAMES, TARGETS, kernels_missed
from opinfo_samples import DTYPES, operators

REAL = [name for name in DTYPES if not name.startswith("complex")]


def missed(name: str, dtype: str, version: str, fused: bool) -> set[tuple[str, str]]:
    """Give the pairs (ONNX operator without a kernel, overload) that `kernels_missed` finds."""
    found = kernels_missed(name, dtype, version, fused=fused)
    return {(kernel.partition(",")[0], overload) for overload, kernel in found}


OF_NOTHING = "takes no tensor without elements"
"""The reason for leaving a sample without elements to torch, for every operator."""


def unnamed(name: str, dtype: str, version: str, fused: bool) -> set[tuple[str, str]]:
    named = exceptions(fused=fused)
    return {
        row
        for row in missed(name, dtype, version, fused)
        if (row not in named or version not in named[row][1]) and not row[0].endswith(OF_NOTHING)
    }


@pytest.mark.parametrize("name", NAMES[::10])
@pytest.mark.parametrize("version", TARGETS)
def test_an_operator_has_kernels_on_cuda(version: str, name: str) -> None:
    dtype = next((dtype for dtype in REAL if DTYPES[dtype] in operators()[name].supported_dtypes("cpu")), REAL[0])
    assert not unnamed(name, dtype, version, fused=False)


MENDED = (
    "amax int64",
    "amin int64",
    "argmax float32",
    "argmax int64",
    "argmin int8",
    "bitwise_left_shift int64",
    "bitwise_not uint8",
    "bitwise_right_shift int32",
    "constant_pad_nd int32",
    "constant_pad_nd int64",
    "index_reduce.mean int64",
    "masked.std float32",
    "max.reduction_no_dim int64",
    "max.reduction_with_dim int64",
    "median float32",
    "mode float32",
    "nn.functional.embedding_bag float32",
    "nn.functional.fractional_max_pool2d float32",
    "nn.functional.interpolate.bicubic uint8",
    "nn.functional.pad.reflect int64",
    "nn.functional.pad.replicate int64",
    "repeat_interleave float32",
    "scatter_reduce.mean int64",
    "trace int64",
)
"""Operators and dtypes whose own kernels are lacking, and which have another form."""


@pytest.mark.parametrize("fused", [False, True], ids=["nodes", "fused"])
@pytest.mark.parametrize("shown", MENDED)
@pytest.mark.parametrize("version", TARGETS)
def test_another_form_has_kernels_on_cuda(version: str, shown: str, fused: bool) -> None:
    name, dtype = shown.split()
    assert not unnamed(name, dtype, version, fused)


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True], ids=["nodes", "fused"])
@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("version", TARGETS)
def test_every_operator_has_kernels_on_cuda(version: str, name: str, dtype: str, fused: bool) -> None:
    assert not unnamed(name, dtype, version, fused)


@pytest.mark.parametrize("fused", [False, True], ids=["nodes", "fused"])
@pytest.mark.parametrize("row", EXCEPTIONS, ids=" ".join)
@pytest.mark.parametrize("version", TARGETS)
def test_an_exception_is_still_one(version: str, row: tuple[str, str], fused: bool) -> None:
    witness, versions = EXCEPTIONS[row]
    name, dtype = witness.split()
    is_one = row in exceptions(fused=fused) and version in versions
    assert (row in missed(name, dtype, version, fused)) == is_one, f"{witness} no longer shows it, or still does"


def test_every_exception_has_a_reason() -> None:
    assert {lacking for lacking, _ in EXCEPTIONS} == REASONS.keys()
