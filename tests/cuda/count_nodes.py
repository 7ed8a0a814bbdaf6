"""Counts the launches of a training step of the benchmarks' models on CUDA, with each form on and off.

    PYTHONPATH=. python tests/cuda/count_nodes.py [--version 1.31.1] [--size tiny] [NAME …]

prints the table of docs/internals/cuda.md. Nothing runs on CUDA. A node of a session that only changes a shape is not
counted, as ONNX Runtime launches nothing for it; of torch's, each node that it runs by choice counts as one.
"""

from __future__ import annotations

import argparse
import contextlib
import operator
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cuda_target import Compiled, autocast, compiled_for

from bench.workloads import WORKLOADS, build
from ort_dynamo.runtime.installed.providers import recorded_cuda_targets
from ort_dynamo.targets.target import Target
from ort_dynamo.testing import patch_facts

FREE = ("Constant", "Identity", "Reshape", "Squeeze", "Unsqueeze")

PLACES = ("leaves_convolution_gradients", "leaves_normalizations", "leaves_attention", "adds_in_any_order")
FORMS = ("weighs_by_convolution", "computes_in_half")

COLUMNS: dict[str, tuple[str, ...]] = {
    "no fact": (),
    "forms": FORMS,
    "forms, gradients of convolutions": (*FORMS, PLACES[0]),
    "forms, normalizations": (*FORMS, PLACES[1]),
    "forms, attention": (*FORMS, PLACES[2]),
    "forms, gradients of lookups": (*FORMS, PLACES[3]),
    "all": (*FORMS, *PLACES),
}
"""Heading -> facts of the Target that are on."""


@contextlib.contextmanager
def facts(on: tuple[str, ...]) -> Iterator[None]:
    """Only these facts of a CUDA target hold."""
    with pytest.MonkeyPatch.context() as patch:
        patch_facts(patch, **{name: name in on for name in (*PLACES, *FORMS)})
        yield


def compiled(name: str, size: Any, dtype: torch.dtype, target: Target) -> Compiled:
    """A model's training step, compiled."""
    workload = build(name, size)
    torch._dynamo.reset()
    with compiled_for(target) as (backend, found), autocast(dtype):
        torch.compile(workload.module, backend=backend, fullgraph=True)(*workload.batch)
    return found


def cell(found: Compiled) -> str:
    """Kernels of sessions in forward and backward, sessions, and kernels of torch's."""
    counts = [sum(node.op_type not in FREE for node in model.graph.node) for model in found.models]
    graphs = [graph for record in found.records for graph in record.graphs]
    chosen = sum(map(operator.methodcaller("total"), (graph.chosen for graph in graphs)))
    return f"{sum(counts)} in {len(counts)}" + (f" + {chosen}" if chosen else "")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="workloads (default: all)")
    parser.add_argument("--version", default="1.31.1", choices=[target.version for target in recorded_cuda_targets()])
    parser.add_argument("--size", default="tiny")
    arguments = parser.parse_args()
    target = next(target for target in recorded_cuda_targets() if target.version == arguments.version)
    print("| model | dtype | " + " | ".join(COLUMNS) + " |\n" + "|---" * (2 + len(COLUMNS)) + "|")
    for name in arguments.names or WORKLOADS:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            cells = []
            for on in COLUMNS.values():
                with facts(on):
                    cells.append(cell(compiled(name, arguments.size, dtype, target)))
            print(f"| {name} | {str(dtype).removeprefix('torch.')} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
