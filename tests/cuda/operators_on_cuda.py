"""Lists the operators of PyTorch's operator database that have a kernel on the CPU and none on CUDA.

    PYTHONPATH=tests/opinfo python tests/cuda/operators_on_cuda.py 1.31.1                     every operator and dtype
    PYTHONPATH=tests/opinfo python tests/cuda/operators_on_cuda.py 1.31.1 float32 --part 1/4  a quarter of the operators
    PYTHONPATH=tests/opinfo python tests/cuda/operators_on_cuda.py 1.31.1 int64 --fused       with fused kernels

prints overload, kernel, and the operators and dtypes that show it. Nothing is computed on CUDA.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import re
from collections import defaultdict
from functools import cache
from typing import Any

import pytest
import torch
from cuda_target import compiled_for, kernels_lacking
from opinfo_samples import DTYPES, operators, quiet, samples_of
from torch._dynamo.utils import counters
from torch.fx import Node

from ort_dynamo.runtime.installed.providers import recorded_cpu_targets, recorded_cuda_targets
from ort_dynamo.segment import probe_lowering
from ort_dynamo.targets.target import Target

__all__ = ["NAMES", "TARGETS", "kernels_missed"]

SAMPLES = 2
"""The number of samples of each operator and dtype."""

TARGETS = {
    target.version: (target, cpu) for target, cpu in zip(recorded_cuda_targets(), recorded_cpu_targets(), strict=True)
}
"""Version -> the recorded kernels of CUDA, and those of the CPU."""

NAMES = sorted(name for name in operators() if not name.startswith("jiterator"))
"""The operators of the database, without those that torch compiles for a device that is there."""


@cache
def kernels_missed(name: str, dtype: str, version: str, *, fused: bool = False) -> frozenset[tuple[str, str]]:
    """Overload and kernel, of each node of an operator's samples that CUDA alone does not take.

    A node of a model that no kernel takes counts as the overload "a model": lowering should have seen it.
    """
    recorded, cpu = TARGETS[version]
    target = dataclasses.replace(recorded, fuses_kernels=fused)
    missed: set[tuple[str, str]] = set()
    refusal = probe_lowering.refusal

    def refuse(node: Node, target: Target, **given: Any) -> str | None:
        reason = refusal(node, target=target, **given)
        if reason is not None and refusal(node, target=cpu) is None:
            said = re.search(r" has no (\w+) kernel for (.*)$", reason)
            missed.add((str(node.target), f"{said[1]}, {said[2]}" if said else reason))
        return reason

    function = operators()[name].op
    for sample in samples_of(operators()[name], DTYPES[dtype], SAMPLES):
        torch._dynamo.reset()
        counters.clear()
        with (
            quiet(),
            compiled_for(target, placement="onnxruntime") as (backend, found),
            pytest.MonkeyPatch.context() as patch,
        ):
            patch.setattr(probe_lowering, "refusal", refuse)
            compiled = torch.compile(function, backend=backend, dynamic=False)
            try:
                compiled(sample.input, *sample.args, **sample.kwargs)
            except RuntimeError:  # eager must refuse it, too: the database has samples that torch cannot run
                torch._dynamo.reset()
                with pytest.raises(RuntimeError):
                    function(sample.input, *sample.args, **sample.kwargs)
        for model in found.models:
            missed |= {("a model", kernel) for kernel in kernels_lacking(model, target)}
    return frozenset(missed)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", choices=TARGETS)
    parser.add_argument("dtypes", nargs="*", default=list(DTYPES))
    parser.add_argument("--part", default="1/1", metavar="K/N")
    parser.add_argument("--fused", action="store_true", help="let groups of nodes be fused kernels")
    arguments = parser.parse_args()
    part, parts = map(int, arguments.part.split("/"))
    logging.disable(logging.WARNING)  # each node that stays in eager
    seen: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name in NAMES[part - 1 :: parts]:
        for dtype in arguments.dtypes:
            for missed in kernels_missed(name, dtype, arguments.version, fused=arguments.fused):
                seen[missed].append(f"{name} {dtype}")
    for (overload, kernel), where in sorted(seen.items()):
        print(f"{overload} | {kernel} | {'; '.join(where)}")


if __name__ == "__main__":
    main()
