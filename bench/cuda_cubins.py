"""Compares the time that fused kernels need for their instructions with that for their bytes. No device.

    python -m bench.cuda_cubins ["gpt, 24 layers" …]

Each kernel of a model's training step (bench/cuda_graphs.py) is compiled for an H100 by Triton, and disassembled. A
loop over the rows of a part, or along a row, counts as often as its counter's step and limit say, since ptxas unrolls
some of them. Instructions behind the end of a kernel are rare ones, and do not count. A kernel with few programs leaves
multiprocessors idle, so their number is shown, too.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx

from bench.cuda_floor import RATE, bytes_of_nodes
from bench.cuda_graphs import arguments_of, compiled_graphs, models_of
from bench.cuda_models import COUNTED, LARGE
from ort_dynamo.graph.fused_op import DOMAIN, FusedOp
from ort_dynamo.runtime.kernels.fused_kernel import CompiledKernel
from ort_dynamo.runtime.kernels.kernel_compiler import compile_kernels
from ort_dynamo.targets.target import Target

if (_folder := str(Path(__file__).resolve().parent.parent / "tests" / "runtime")) not in sys.path:
    sys.path.append(_folder)

from kernel_resources import disassembled

__all__ = ["ISSUED", "Cost", "costs", "instructions", "main"]

ISSUED = 132 * 4 * 1.755e9
"""Instructions of a warp that an H100 or H200 issues in a second: multiprocessors, schedulers of each, and hertz."""


@dataclass(frozen=True)
class Cost:
    """A kernel and what it costs.

    Attributes:
        op: the kernel.
        launches: in one training step.
        programs: of one launch.
        by_bytes: seconds of one launch, at the rate of a copy.
        by_instructions: seconds of one launch, if all multiprocessors are busy.
    """

    op: FusedOp
    launches: int
    programs: int
    by_bytes: float
    by_instructions: float

    @property
    def seconds(self) -> float:
        """Seconds of a training step."""
        return self.launches * max(self.by_bytes, self.by_instructions)


def costs(name: str, target: Target) -> Iterator[Cost]:
    """Yield the kernels of constant sizes of a model's step, for a target that fuses."""
    ops: dict[str, FusedOp] = {}
    launches, moved = Counter[str](), dict[str, int]()
    graphs = [built for _, gm in compiled_graphs(name, "full", target) for built in models_of(gm)]
    for built in graphs:
        ops |= {op.name: op for op in built.kernels if not op.symbols}
    for model, times in Counter(built.model for built in graphs).items():  # equal layers share one
        for node, nbytes in bytes_of_nodes(onnx.ModelProto.FromString(model)):
            if node.domain == DOMAIN and nbytes is not None:
                launches[node.op_type] += times
                moved[node.op_type] = nbytes
    kernels = compile_kernels([*ops.values()], (9, 0))
    for op in ops.values():
        kernel = kernels[op.name]
        assert isinstance(kernel, CompiledKernel), kernel
        programs = op.programs([])
        issued = instructions(op, kernel.aligned.cubin) * op.num_warps * programs
        yield Cost(op, launches[op.name], programs, moved[op.name] / RATE, issued / ISSUED)


def instructions(op: FusedOp, cubin: bytes) -> float:
    """Count the instructions that a warp of a kernel executes."""
    body = _code(cubin)
    walked = re.search(r"for first in range\(0, (\d+), (\d+)\)", op.source)
    size, step = map(int, walked.groups()) if walked else (1, 1)
    count = float(len(body))
    starts = {label: place for place, (label, _) in enumerate(body) if label}
    for place, (_, text) in enumerate(body):
        target = re.search(r"\bBRA.*(\.L_x_\d+)", text)
        if target and (start := starts.get(target[1], place)) < place:
            repeated = [text for _, text in body[start : place + 1]]
            count += len(repeated) * (_times(repeated, size, step) - 1)
    return count


def _times(loop: Sequence[str], size: int, step: int) -> int:
    """Count how often the body of a loop runs, which ptxas may have unrolled."""
    added = r"U?IADD3 (U?R\d+), (?:U?P\d, )?\1(?:\.reuse)?, (0x[0-9a-f]+)"
    steps = {name: int(number, 16) for text in loop for name, number in re.findall(added, text)}
    for text in loop:
        found = re.search(r"ISETP\.(\w+).* (U?R\d+)(?:\.reuse)?, (0x[0-9a-f]+)", text)
        if found and steps.get(found[2]):
            limit = int(found[3], 16)
            return math.ceil((limit if found[1] == "NE" else limit + step) / steps[found[2]])  # one begins at -step
    return math.ceil(size / step)


def _code(cubin: bytes) -> list[tuple[str, str]]:
    """Return (label, "" if it has none; text) of each instruction up to the end of the kernel."""
    found, label = [], ""
    for line in disassembled(cubin).splitlines():
        if named := re.match(r"(\.L_x_\d+):", line):
            label = named[1]
        elif code := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*)", line):
            found.append((label, code[1]))
            label = ""
            if code[1].startswith("EXIT"):
                break
    return found


def main(given: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments, recorded = arguments_of(parser, [*LARGE, *COUNTED], given)
    print("| model | kernel | launches | programs | µs by bytes | µs by instructions |\n|---|---|---|---|---|---|")
    for name in arguments.names:
        found = sorted(costs(name, replace(recorded, fuses_kernels=True)), key=lambda one: one.seconds, reverse=True)
        for one in found:
            cells = (name, one.op.name, one.launches, one.programs)
            print("|", " | ".join(map(str, cells)), f"| {one.by_bytes * 1e6:.1f} | {one.by_instructions * 1e6:.1f} |")
        by_bytes, all_of_them = sum(one.launches * one.by_bytes for one in found), sum(one.seconds for one in found)
        print(f"| {name} | all | | | {by_bytes * 1e6:.0f} | {all_of_them * 1e6:.0f} with the bytes |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
