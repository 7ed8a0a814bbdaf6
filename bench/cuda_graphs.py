"""Compiles training steps of models for a recorded CUDA target, in bfloat16 autocast. No device, and nothing runs."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

from bench.cuda_models import COUNTED, LARGE, build_model
from ort_dynamo.compilation import compiler
from ort_dynamo.graph.build import BuiltGraph
from ort_dynamo.passes.fx.analysis.saved_tensors import is_tangent
from ort_dynamo.runtime.installed.providers import recorded_cuda_targets
from ort_dynamo.targets.target import Target

if (_folder := str(Path(__file__).resolve().parent.parent / "tests" / "cuda")) not in sys.path:
    sys.path.append(_folder)

from cuda_target import autocast, compiled_for

__all__ = ["arguments_of", "compiled_graphs", "models_of"]


class _CompiledError(Exception):
    """Ends a step that is compiled, before it runs."""


def compiled_graphs(name: str, scale: Any, target: Target) -> list[tuple[str, GraphModule]]:
    """Compile a model's training step for a CUDA target; gives "forward" or "backward", and the graph of islands.

    Args:
        name: a model of bench/cuda_models.py.
        scale: "full" or "tiny".
        target: the device and runtime that it is compiled for.
    """
    workload = build_model(name, scale, torch.device("cpu"))
    outer: list[tuple[str, GraphModule]] = []
    torch._dynamo.reset()
    with compiled_for(target) as (backend, _), pytest.MonkeyPatch.context() as patch, autocast(torch.bfloat16):
        patch.setenv("ORT_DYNAMO_CACHE", "0")  # a stored graph opens sessions
        segment = compiler.segment

        def kept(gm: GraphModule, *args: Any, **named: Any) -> Any:
            segmented = segment(gm, *args, **named)
            is_backward = any(map(is_tangent, gm.graph.find_nodes(op="placeholder")))
            outer.append(("backward" if is_backward else "forward", segmented.gm))
            return segmented

        def ended(*args: Any) -> Any:
            raise _CompiledError

        def compile_only(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            backend(gm, inputs)
            return ended

        patch.setattr(compiler, "segment", kept)
        with contextlib.suppress(_CompiledError):
            torch.compile(workload.module, backend=compile_only, fullgraph=True)(*workload.batch)
    return outer


def models_of(gm: GraphModule) -> Iterator[BuiltGraph]:
    """Yield the built graph of each island, in order."""
    for node in gm.graph.nodes:
        if node.op == "call_module":
            island: Any = gm.get_submodule(str(node.target))
            yield island.compiled.built


def arguments_of(
    parser: argparse.ArgumentParser, models: Sequence[str], given: Sequence[str] | None
) -> tuple[argparse.Namespace, Target]:
    """Read names of models, all large ones by default, and a version of onnxruntime-gpu; return its recorded target."""
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(models)}")
    targets = {target.version: target for target in recorded_cuda_targets()}
    parser.add_argument("--version", default="1.31.1", choices=[*targets])
    arguments = parser.parse_args(given)
    if unknown := [name for name in arguments.names if name not in models]:
        parser.error(f"there is no model {', '.join(unknown)}: choose of {', '.join(models)}")
    arguments.names = arguments.names or [*LARGE, *COUNTED]
    return arguments, targets[arguments.version]
