"""The fused kernels of a session are compiled once; a session without a compiler runs without them."""

from __future__ import annotations

import dataclasses
import logging
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from ort_dynamo.compilation.compiler import build_spec
from ort_dynamo.graph.build import BuiltGraph
from ort_dynamo.graph.fused_op import FusedOp
from ort_dynamo.lowering.build_island import build_island
from ort_dynamo.options.groups import Options
from ort_dynamo.runtime.compiled_graph import open_graph
from ort_dynamo.runtime.installed.providers import find_target
from ort_dynamo.runtime.kernels import session_kernels
from ort_dynamo.runtime.kernels.fused_kernel import CompiledKernel, KernelVariant, Unavailable

CPU = torch.device("cpu")
VARIANT = KernelVariant(b"code", "entry", 4, 0, 2)


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> BuiltGraph:
    """A graph with one fused kernel, on a device of capability 9.0."""
    gm = make_fx(lambda x: (x.sin().exp() * x,), tracing_mode="fake")(torch.ones(2, 3))
    gm.graph.output_node().meta.pop("val", None)
    target = dataclasses.replace(find_target("cpu"), fuses_kernels=True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(session_kernels, "_KERNELS", {})
    return build_island(gm, build_spec(Options(), target, CPU, "inference"), "test")


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[FusedOp]:
    """Record the kernels that would be compiled, without Triton."""
    found: list[FusedOp] = []

    def compile_kernels(ops: Sequence[FusedOp], capability: Any, store: Any) -> Mapping[str, CompiledKernel]:
        assert capability == (9, 0)
        found.extend(ops)
        return {op.name: CompiledKernel(VARIANT, VARIANT) for op in ops}

    monkeypatch.setattr(session_kernels, "compile_kernels", compile_kernels)
    return found


def test_a_kernel_is_compiled_once(built: BuiltGraph, compiled: list[FusedOp]) -> None:
    target = find_target("cpu")
    (kernel,) = session_kernels.session_kernels(built, target, CPU)
    assert session_kernels.session_kernels(built, target, CPU) == (kernel,)
    assert compiled == [kernel.op] == list(built.kernels)
    assert kernel.provider == target.provider
    assert kernel.code == CompiledKernel(VARIANT, VARIANT)


def test_a_graph_without_kernels_asks_for_no_device(built: BuiltGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cuda, "get_device_capability")
    assert session_kernels.session_kernels(dataclasses.replace(built, kernels=()), find_target("cpu"), CPU) == ()


def test_without_its_kernel_a_session_runs_the_function(
    built: BuiltGraph, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(session_kernels, "compile_kernels", lambda ops, *_: {op.name: "no Triton" for op in ops})
    x = torch.randn(2, 3)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            (result,) = open_graph(built, find_target("cpu"), CPU)(x)
            torch.testing.assert_close(result, x.sin().exp() * x)
    assert [record.getMessage() for record in caplog.records if "no Triton" in record.getMessage()] == [
        f"ort_train: the fused kernel {built.kernels[0].name} is not used: no Triton. ONNX Runtime runs its operators."
    ]


def test_without_a_way_to_register_it_runs_the_function_too(
    built: BuiltGraph,
    compiled: list[FusedOp],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    seen = []

    class Store:
        folder = tmp_path

        def load(self, key: str) -> bytes | None:
            return None

        def store(self, key: str, data: bytes) -> None: ...

    monkeypatch.setattr(session_kernels, "registration", lambda folder: seen.append(folder) or Unavailable("none here"))
    x = torch.randn(2, 3)
    with caplog.at_level(logging.WARNING):
        (result,) = open_graph(built, find_target("cpu"), CPU, Store())(x)
    torch.testing.assert_close(result, x.sin().exp() * x)
    assert seen == [tmp_path]
    assert "none here" in caplog.text
    assert len(compiled) == 1


@pytest.fixture
def undecided() -> Any:
    """Clear the cache of `can_fuse` before and after the test."""
    session_kernels.can_fuse.cache_clear()
    yield session_kernels.can_fuse
    session_kernels.can_fuse.cache_clear()


def test_kernels_need_triton(undecided: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_kernels, "triton_version", lambda: None)
    assert not undecided()


@pytest.mark.parametrize("way", ["compiler", "callbacks", "none"])
def test_kernels_need_a_way_to_be_launched(undecided: Any, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    monkeypatch.setattr(session_kernels, "triton_version", lambda: "3.9")
    monkeypatch.setattr(shutil, "which", lambda name: "/bin/cc" if way == "compiler" else None)

    class Callbacks:
        @classmethod
        def load(cls) -> Any:
            return cls() if way == "callbacks" else Unavailable("nothing")

    monkeypatch.setattr(session_kernels, "KernelCallbacks", Callbacks)
    assert undecided() == (way != "none")
