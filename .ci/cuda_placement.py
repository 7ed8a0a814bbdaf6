"""Asks ONNX Runtime's CUDA provider itself where it would place each node of the benchmarks' models. No GPU is needed.

    python .ci/cuda_placement.py [--environment DIR] [NAME …]

Run by a Python that has the project with its extra dev. It compiles each model's tiny size, in float32 and under
autocast to bfloat16 and float16, with torch's kernels by choice and without, for the recorded CUDA target, and with
sizes that vary, without fused kernels and with them. It has the sessions' models placed by the release that the record
is of, in an environment of its own that pip makes (.ci/venv-placement, 2.5 GB), with the stand-in for a device that
record_kernels.py has. ONNX Runtime optimizes each model first, as in a real session; nothing is computed, and no
session opens. It ends with status 1 if a node is left to the CPU provider that does more than arithmetic of sizes, or a
copy between host and device is inserted.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from record_kernels import make_environment

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from ort_dynamo.graph.fused_op import fused_ops_from_json, fused_ops_to_json  # noqa: E402
from ort_dynamo.runtime.kernels.fused_kernel import FusedKernel, HostCode  # noqa: E402
from ort_dynamo.runtime.kernels.kernel_library import KernelLibrary  # noqa: E402

VERSION = "1.31.1"


_OF_SIZES = frozenset(
    {"Add", "Cast", "Concat", "Div", "Max", "Min", "Mod", "Mul", "Reshape", "Squeeze", "Sub", "Unsqueeze"}
)


@dataclass
class Placement:
    """The placement of the nodes of one model.

    Attributes:
        cuda: the number of nodes on CUDA.
        cpu: operator -> number of nodes on the CPU provider.
        copies: the number of copies between host and device.
        log: the log of ONNX Runtime.
    """

    cuda: int = 0
    cpu: Counter[str] = field(default_factory=Counter)
    copies: int = 0
    log: str = ""

    @property
    def is_whole(self) -> bool:
        """True if all of the model would run on CUDA, but for arithmetic of sizes, which needs no copies."""
        return self.cuda > 0 and self.cpu.keys() <= _OF_SIZES and not self.copies


def read_log(log: str) -> Placement:
    """Read a placement off the verbose log of a session that was to be opened."""
    found, provider = Placement(log=log), ""
    for line in log.splitlines():
        if placed := re.search(r"(?:All nodes|Node\(s\)) placed on \[(\w+)\]\. Number of nodes: (\d+)", line):
            provider = placed[1]
            if provider == "CUDAExecutionProvider":
                found.cuda += int(placed[2])
            elif "All nodes" in line:
                found.cpu["(all)"] += int(placed[2])
        elif node := re.search(r"VerifyEachNodeIsAssignedToAnEp\]\s+(\w+) \(", line):
            if provider == "CPUExecutionProvider":
                found.cpu[node[1]] += 1
        elif copies := re.search(r" (\d+) Memcpy nodes are added to the graph", line):
            found.copies += int(copies[1])  # the list of nodes is not printed if all are on one provider
    return found


def ask(python: Sequence[str], model: Path, without: Sequence[str] = ()) -> Placement:
    """Have one model placed, by a Python of the environment; `without` these of ONNX Runtime's optimizers."""
    command = [*python, __file__, "--open", str(model), json.dumps(list(without))]
    run = subprocess.run(command, capture_output=True, text=True)
    return read_log(run.stdout + run.stderr)


def open_session(model: str, without: str) -> None:
    """Try to open a session in the environment; print to stderr all that ONNX Runtime logs.

    The fused kernels of the model are in a file beside it. The code of a kernel does not matter, as none runs.
    """
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.log_severity_level, settings.log_verbosity_level = 0, 1
    if ops := fused_ops_from_json(kernels_beside(Path(model)).read_text()):
        library = KernelLibrary.load(None)
        assert isinstance(library, KernelLibrary), library
        library.register(settings, [FusedKernel(op, HostCode(1), "CUDAExecutionProvider") for op in ops])
    providers = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    # It fails when the device is first used, which is after the placement.
    onnxruntime.InferenceSession(model, settings, providers=providers, disabled_optimizers=json.loads(without))


def models(names: Sequence[str], folder: Path) -> Iterator[tuple[Path, list[str]]]:
    """Yield the model files of each workload's training step, and the optimizers that a session leaves out."""
    sys.path.insert(0, str(ROOT / "tests" / "cuda"))
    import onnx
    import onnx_ir as ir
    import torch
    from cuda_target import compiled_for

    from bench.workloads import WORKLOADS, build
    from ort_dynamo.runtime.installed.capabilities import omitted_optimizers
    from ort_dynamo.runtime.installed.providers import recorded_cuda_targets

    recorded = next(target for target in recorded_cuda_targets() if target.version == VERSION)
    kinds = (torch.float32, torch.bfloat16, torch.float16)
    fixed = itertools.product(names or WORKLOADS, kinds, ("fastest", "onnxruntime"), [False], [False])
    varying = itertools.product(names or WORKLOADS, kinds[:2], ["fastest"], [True], [False, True])
    for name, dtype, placement, dynamic, fused in (*fixed, *varying):
        target = dataclasses.replace(recorded, fuses_kernels=fused)
        workload = build(name, "tiny")
        wide = dtype == torch.float32
        autocast: Any = contextlib.nullcontext() if wide else torch.autocast("cpu", dtype)
        torch.compiler.reset()
        with compiled_for(target, placement=placement) as (backend, found), autocast:
            torch.compile(workload.module, backend=backend, fullgraph=True, dynamic=dynamic)(*workload.batch)
        way = "-".join([str(dtype).removeprefix("torch."), placement, *["dynamic"] * dynamic, *["fused"] * fused])
        for place, (model, kernels) in enumerate(zip(found.models, found.kernels, strict=True)):
            file = folder / f"{name}-{way}-{place}.onnx"
            onnx.save(model, file)
            kernels_beside(file).write_text(fused_ops_to_json(kernels))
            values = onnx.shape_inference.infer_shapes(model).graph.value_info
            dtypes = {ir.DataType(value.type.tensor_type.elem_type) for value in values}
            yield file, omitted_optimizers(dtypes, target)


def kernels_beside(model: Path) -> Path:
    """Return the path of the file with the fused kernels of a model."""
    return model.with_suffix(".json")


MISPLACED = """<ir_version: 9, opset_import: ["": 20]>
test (int64[2] x, float[2] y) => (int64[2] z, float[2] w) { z = BitwiseAnd (x, x)  w = Relu (y) }"""
"""A model with a node that has no kernel on CUDA. If that is not seen, nothing here means anything."""


def main() -> int:
    """Command line."""
    if sys.argv[1:2] == ["--open"]:
        open_session(*sys.argv[2:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="workloads (default: all)")
    parser.add_argument(
        "--environment", type=Path, default=ROOT / ".ci" / "venv-placement", help="where it is, or is made"
    )
    arguments = parser.parse_args()
    import onnx

    python = make_environment(arguments.environment, VERSION, "cuda")
    wrong, nodes, count = [], 0, 0
    with tempfile.TemporaryDirectory() as temporary:
        misplaced = Path(temporary, "misplaced.onnx")
        onnx.save(onnx.parser.parse_model(MISPLACED), misplaced)
        kernels_beside(misplaced).write_text(fused_ops_to_json([]))
        found = ask(python, misplaced)
        if found.cpu != {"BitwiseAnd": 1} or found.cuda != 1:
            print(f"a node without a kernel is not seen:\n{found.log[-3000:]}")
            return 2
        for file, without in models(arguments.names, Path(temporary)):
            found = ask(python, file, without)
            count, nodes = count + 1, nodes + found.cuda
            if not found.is_whole:
                wrong.append(file.stem)
                print(f"{file.stem}: {dict(found.cpu)} on the CPU, {found.copies} copies")
                print("" if found.cuda else found.log[-3000:])
    print(f"{count} models, {nodes} nodes on CUDA after ONNX Runtime's own optimizers, {len(wrong)} models with others")
    return int(bool(wrong) or not count)


if __name__ == "__main__":
    raise SystemExit(main())
