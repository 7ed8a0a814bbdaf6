"""Reads the resources and the instructions of a compiled kernel by NVIDIA's cuobjdump and nvdisasm."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple


class Resources(NamedTuple):
    """Registers of each thread, and its bytes of stack and of local memory, to which registers are spilled."""

    registers: int
    stack: int
    local: int


def resources(cubin: bytes) -> Resources:
    """Those of the one function of a cubin."""
    said = _said("cuobjdump", "--dump-resource-usage", cubin)
    ((registers, stack, local),) = re.findall(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", said)
    return Resources(int(registers), int(stack), int(local))


def instructions(cubin: bytes) -> int:
    """Count the instructions of its one function, those behind its end included, which pad it or are rarely needed."""
    return len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/", disassembled(cubin), re.MULTILINE))


def disassembled(cubin: bytes) -> str:
    """Return the listing of its code."""
    return _said("nvdisasm", "-c", cubin)


def _said(tool: str, option: str, cubin: bytes) -> str:
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        command = [getattr(knobs.nvidia, tool).path, option, path]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
