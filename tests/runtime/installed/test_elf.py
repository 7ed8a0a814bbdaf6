"""Tests of reading the libraries that a shared library needs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from ort_dynamo.runtime.installed.elf import Dependencies, dependencies


@pytest.mark.skipif(sys.platform != "linux", reason="libraries of other systems are no ELF files")
def test_torchs_own_module_needs_torchs_library_from_beside_it() -> None:
    path = Path(torch._C.__file__)
    found = dependencies(path)
    assert found is not None
    assert "libtorch_python.so" in found.needed
    assert str(path.parent / "lib") in found.folders


@pytest.mark.parametrize("content", [b"", b"\x7fELF", b"MZ" + bytes(100), b"\x7fELF\x01\x01" + bytes(100)])
def test_other_files_are_not_read(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    assert dependencies(tmp_path / "file") is None


def test_a_library_without_a_dynamic_section_needs_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"\x7fELF\x02\x01" + bytes(100))
    assert dependencies(tmp_path / "file") == Dependencies((), ())
