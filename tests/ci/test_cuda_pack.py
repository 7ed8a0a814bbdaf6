"""The logic of .ci/cuda_pack.py, on a fat binary that is made here."""

from __future__ import annotations

import struct
from importlib.metadata import PathDistribution
from pathlib import Path

import cuda_pack
import pytest

PTX, ELF = 1, 2
USED, FLASH = b".text._Z7softmaxPf", b".text._ZN11onnxruntime5flash3fwdEv"


def entry(kind: int, architecture: int, code: bytes, compressed: int = 0, unpacked: int = 0) -> bytes:
    header = bytearray(64)
    struct.pack_into("<HHIQ", header, 0, kind, 0, 64, len(code))
    struct.pack_into("<I", header, 16, compressed)
    struct.pack_into("<I", header, 28, architecture)
    struct.pack_into("<Q", header, 56, unpacked)
    return bytes(header) + code


def fat(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def padded(code: bytes) -> bytes:
    return code.ljust(64, b"\1")


def no_unpacking(raw: bytes, size: int) -> bytes:
    raise AssertionError("nothing here is compressed")


def left(code: bytearray) -> list[tuple[int, bool]]:
    """Architecture of each entry, and whether its code is still there."""
    return [(e.architecture, any(code[e.place : e.place + e.stored])) for f in cuda_pack.fat_binaries(code) for e in f]


def test_other_architectures_and_unused_kernels_become_zeros() -> None:
    code = bytearray(
        bytes(24)  # between fat binaries there is room
        + fat(entry(ELF, 80, padded(USED)), entry(ELF, 90, padded(USED)), entry(PTX, 90, padded(USED)))
        + fat(entry(ELF, 90, padded(FLASH)))
        + fat(entry(ELF, 90, padded(FLASH + b"\0" + USED)))
    )
    size = len(code)
    gone = cuda_pack.zeroed(code, 90, no_unpacking)
    assert gone == {"architecture 80": 64, "architecture 90": 64, "unused": 64}
    assert len(code) == size
    assert left(code) == [(80, False), (90, True), (90, False), (90, False), (90, True)]


def test_code_for_other_architectures_stays_where_there_is_none_for_this_one() -> None:
    code = bytearray(fat(entry(ELF, 80, padded(USED)), entry(PTX, 80, padded(USED))))
    assert not cuda_pack.zeroed(code, 90, no_unpacking)
    assert left(code) == [(80, True), (80, True)]


@pytest.mark.parametrize(("inside", "stays"), [(FLASH, False), (USED, True), (b"no kernel", True)])
def test_kernels_are_found_in_compressed_code(inside: bytes, stays: bool) -> None:
    def unpack(raw: bytes, size: int) -> bytes:
        assert (raw, size) == (b"packed", 99)
        return inside

    code = bytearray(fat(entry(ELF, 90, b"packed".ljust(64, b"\1"), compressed=6, unpacked=99)))
    cuda_pack.zeroed(code, 90, unpack)
    assert left(code) == [(90, stays)]


def test_the_section_of_an_elf_file_is_found() -> None:
    names = b"\0.text\0.nv_fatbin\0"
    header = bytearray(b"\x7fELF\x02".ljust(64, b"\0"))
    sections = [(0, 0, 0), (1, 500, 10), (7, 600, 20), (0, 64, len(names))]
    struct.pack_into("<Q", header, 0x28, 64 + len(names))
    struct.pack_into("<HHH", header, 0x3A, 64, len(sections), 3)
    rows = b"".join(struct.pack("<IIQQQQ", name, 1, 0, 0, at, size).ljust(64, b"\0") for name, at, size in sections)
    library = bytes(header) + names + rows
    assert cuda_pack.section_of(library) == (600, 20)
    with pytest.raises(ValueError, match=r"no section \.debug"):
        cuda_pack.section_of(library, ".debug")
    with pytest.raises(ValueError, match="no 64-bit ELF"):
        cuda_pack.section_of(b"MZ")


def test_torch_finds_the_backend_by_the_metadata(tmp_path: Path) -> None:
    cuda_pack.write_metadata(tmp_path)
    (folder,) = tmp_path.iterdir()
    found = PathDistribution(folder)
    assert found.metadata["Name"] == "ort-dynamo"
    assert found.version in folder.name
    backends = {one.name: one.value for one in found.entry_points if one.group == "torch_dynamo_backends"}
    assert backends["ort_train"] == "ort_dynamo.backend:ort_train"
