"""Packs onnxruntime-gpu for a machine that has a GPU and no network: one file of some 36 MB instead of 255.

    python .ci/cuda_pack.py FOLDER [--version 1.31.1] [--python 3.12] [--architecture 90] [--with PACKAGE …]

writes FOLDER/site.tar.xz. It holds the runtime, packages that the other machine lacks (`--with onnx-ir==1.1.0`), and
this project's metadata, by which torch finds its backend. The project itself travels as a checkout. On that machine:

    mkdir site && tar xf site.tar.xz -C site
    python -m pip uninstall -y onnxruntime                      two distributions of one import name are refused
    PYTHONPATH=site:. python -m bench.device

Only the device code of one architecture is kept (90 is Hopper), without flash attention and the kernels of language
models' inference, which training never launches. Dropped code becomes zeros, which compress to nothing. Offsets stay
as they are, and CUDA loads a module when its first kernel is launched. A dropped kernel cannot be launched, so the file
is for tests and for nothing else. TensorRT's provider and the Python tools of ONNX Runtime are left out.
"""

from __future__ import annotations

import argparse
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = "onnxruntime/capi/libonnxruntime_providers_cuda.so"
LEFT_OUT = (
    "onnxruntime/capi/libonnxruntime_providers_tensorrt.so",
    *(f"onnxruntime/{name}" for name in ("quantization", "tools", "transformers")),
)
UNUSED = re.compile(
    rb"onnxruntime5flash|3llm7kernels|fpA_intB|MoeFCGemm|GroupProblemShape|attention_kernel_batched|moe_|fmhaSm|"
    rb"mha_fused|CollectiveMmaArray"
)
"""Mangled names of kernels that training never launches."""

_MAGIC, _ELF = 0xBA55ED50, 2
_ZSTANDARD = b"\x28\xb5\x2f\xfd"

Unpack = Callable[[bytes, int], bytes]
"""Compressed device code and its size when unpacked -> the code."""


@dataclass(frozen=True)
class Entry:
    """An entry of a fat binary.

    Attributes:
        place: where its code begins.
        stored: bytes that the code takes there.
        kind: 2 is machine code, 1 is PTX.
        architecture: for which the code is.
        compressed: bytes of the compressed code, or 0.
        unpacked: bytes of the code when unpacked.
    """

    place: int
    stored: int
    kind: int
    architecture: int
    compressed: int
    unpacked: int


def section_of(library: bytes, wanted: str = ".nv_fatbin") -> tuple[int, int]:
    """Offset and size of a section of a 64-bit ELF file."""
    if library[:5] != b"\x7fELF\x02":
        raise ValueError("no 64-bit ELF file")
    (headers,) = struct.unpack_from("<Q", library, 0x28)
    size, count, names = struct.unpack_from("<HHH", library, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", library, headers + index * size) for index in range(count)]
    for name, _, _, _, offset, length in sections:
        start = sections[names][4] + name
        if library[start : library.index(b"\0", start)] == wanted.encode():
            return offset, length
    raise ValueError(f"the library has no section {wanted}: it has no device code")


def fat_binaries(code: bytes | bytearray) -> Iterator[list[Entry]]:
    """Yield the entries of each fat binary in a section."""
    at = 0
    while at + 16 <= len(code):
        magic, _, header, length = struct.unpack_from("<IHHQ", code, at)
        if magic != _MAGIC:
            at += 8
            continue
        yield list(_entries(code, at + header, at + header + length))
        at += header + length


def _entries(code: bytes | bytearray, at: int, end: int) -> Iterator[Entry]:
    while at + 64 <= end:
        kind, _, header, stored = struct.unpack_from("<HHIQ", code, at)
        if not header:
            return
        (compressed,), (architecture,) = (struct.unpack_from("<I", code, at + offset) for offset in (16, 28))
        (unpacked,) = struct.unpack_from("<Q", code, at + 56)
        yield Entry(at + header, stored, kind, architecture, compressed, unpacked)
        at += header + stored


def zeroed(code: bytearray, keep: int, unpack: Unpack) -> Counter[str]:
    """Zero unneeded kernels in a section of device code. Gives the bytes by reason."""
    gone: Counter[str] = Counter()
    for entries in list(fat_binaries(code)):
        kept = [entry for entry in entries if entry.kind == _ELF and entry.architecture == keep]
        for entry in entries:
            if kept and entry not in kept:  # without code for the architecture, CUDA compiles the PTX
                reason = f"architecture {entry.architecture}"
            elif (names := kernels(code, entry, unpack)) and all(map(UNUSED.search, names)):
                reason = "unused"
            else:
                continue
            code[entry.place : entry.place + entry.stored] = bytes(entry.stored)
            gone[reason] += entry.stored
    return gone


def kernels(code: bytes | bytearray, entry: Entry, unpack: Unpack) -> list[bytes]:
    """Mangled names of the kernels of an entry."""
    raw = bytes(code[entry.place : entry.place + (entry.compressed or entry.stored)])
    if entry.compressed or raw[:4] == _ZSTANDARD:
        raw = unpack(raw, entry.unpacked)
    return [name for name in re.findall(rb"\.text\.(_Z\w+)", raw) if b"EmptyKernel" not in name]


def _unpack(raw: bytes, size: int) -> bytes:
    """Unpack device code; code in an unknown form stays, as no kernel is found in it."""
    import lz4.block
    import zstandard

    if raw[:4] == _ZSTANDARD:
        return zstandard.ZstdDecompressor().decompress(raw, max_output_size=size)
    try:
        return lz4.block.decompress(raw, uncompressed_size=size)
    except lz4.block.LZ4BlockError:
        return b""


def prune(library: Path, keep: int) -> Counter[str]:
    """Zero the device code that is not needed in a library, in place."""
    content = bytearray(library.read_bytes())
    offset, size = section_of(content)
    code = content[offset : offset + size]
    gone = zeroed(code, keep, _unpack)
    content[offset : offset + size] = code
    library.write_bytes(content)
    return gone


def write_metadata(site: Path, project: Path = ROOT / "pyproject.toml") -> None:
    """Write this project's metadata: its name, its version, and the entry points by which torch finds the backend."""
    about = tomllib.loads(project.read_text())["project"]
    folder = site / f"{about['name'].replace('-', '_')}-{about['version']}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {about['name']}\nVersion: {about['version']}\n")
    lines = []
    for group, entries in about["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in entries.items())]
    (folder / "entry_points.txt").write_text("\n".join([*lines, ""]))


def pack(folder: Path, version: str, python: str, architecture: int, others: Sequence[str]) -> Path:
    """Make the file. Gives its path."""
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        subprocess.run([sys.executable, "-m", "venv", work / "venv"], check=True)
        here = str(work / "venv" / "bin" / "python")
        pip = [here, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", "lz4", "zstandard"], check=True)
        download = ["download", "--no-deps", "--only-binary=:all:", "--python-version", python, "-d", work / "wheels"]
        subprocess.run([*pip, *download, f"onnxruntime-gpu=={version}", *others], check=True)
        site = work / "site"
        for wheel in sorted((work / "wheels").glob("*.whl")):
            zipfile.ZipFile(wheel).extractall(site)
        for name in LEFT_OUT:
            path = site / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        write_metadata(site)
        subprocess.run([here, __file__, "--prune", site / LIBRARY, str(architecture)], check=True)
        folder.mkdir(parents=True, exist_ok=True)
        with tarfile.open(folder / "site.tar.xz", "w:xz", preset=3) as file:
            for path in sorted(site.iterdir()):
                file.add(path, path.name)
    return folder / "site.tar.xz"


def main() -> None:
    """Command line."""
    if sys.argv[1:2] == ["--prune"]:
        gone = prune(Path(sys.argv[2]), int(sys.argv[3]))
        print(", ".join(f"{reason}: {count >> 20} MiB" for reason, count in gone.items()), "zeroed")
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--version", default="1.31.1", help="of onnxruntime-gpu; default: 1.31.1")
    parser.add_argument("--python", default="3.12", help="of the other machine; default: 3.12")
    parser.add_argument("--architecture", type=int, default=90, help="of the GPU; default: 90")
    parser.add_argument("--with", dest="others", nargs="+", default=[], metavar="PACKAGE", help="packages to add")
    given = parser.parse_args()
    made = pack(given.folder, given.version, given.python, given.architecture, given.others)
    print(f"{made}: {made.stat().st_size >> 20} MiB")


if __name__ == "__main__":
    main()
