"""Each operator of PyTorch's database that is native on the CPU is native on CUDA, but for what exceptions.py names."""

from __future__ import annotations

import pytest
from exceptions_on_cuda import EXCEPTIONS, REASONS
from operators_on_cuda import NAMES, TARGETS, kernels_missed
from opinfo_samples import DTYPES, operators

REAL = [name for name in DTYPES if not name.startswith("complex")]


def missed(name: str, dtype: str, version: str) -> set[tuple[str, str]]:
    """What `kernels_missed` finds, by the ONNX operator that lacks a kernel."""
    return {(kernel.partition(",")[0], overload) for overload, kernel in kernels_missed(name, dtype, version)}


OF_NOTHING = "takes no tensor without elements"
"""The reason to leave a sample to torch that has no element, whatever the operator."""


def unnamed(name: str, dtype: str, version: str) -> set[tuple[str, str]]:
    return {
        row
        for row in missed(name, dtype, version)
        if (row not in EXCEPTIONS or version not in EXCEPTIONS[row][1]) and not row[0].endswith(OF_NOTHING)
    }


@pytest.mark.parametrize("name", NAMES[::10])
@pytest.mark.parametrize("version", TARGETS)
def test_an_operator_has_kernels_on_cuda(version: str, name: str) -> None:
    dtype = next((dtype for dtype in REAL if DTYPES[dtype] in operators()[name].supported_dtypes("cpu")), REAL[0])
    assert not unnamed(name, dtype, version)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("version", TARGETS)
def test_every_operator_has_kernels_on_cuda(version: str, name: str, dtype: str) -> None:
    assert not unnamed(name, dtype, version)


@pytest.mark.parametrize("row", EXCEPTIONS, ids=" ".join)
@pytest.mark.parametrize("version", TARGETS)
def test_an_exception_is_still_one(version: str, row: tuple[str, str]) -> None:
    witness, versions = EXCEPTIONS[row]
    name, dtype = witness.split()
    assert (row in missed(name, dtype, version)) == (version in versions), f"{witness} no longer shows it"


def test_every_exception_has_a_reason() -> None:
    assert {lacking for lacking, _ in EXCEPTIONS} == REASONS.keys()
