"""Sessions in torch's memory, tested on the CPU with streams that only record calls."""

from __future__ import annotations

import dataclasses
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_streams import FakeCuda
from stream_graphs import CPU, CUDA, NEG, built, on_stream

from ort_dynamo.options.groups import SessionOptions
from ort_dynamo.runtime import session, streams, torch_memory
from ort_dynamo.runtime.installed import importing, providers
from ort_dynamo.runtime.installed.importing import onnxruntime
from ort_dynamo.runtime.session import open_session
from ort_dynamo.runtime.session_code import Stopped
from ort_dynamo.runtime.streams import SessionStream
from ort_dynamo.runtime.torch_memory import TORCH_MEMORY, TorchMemory


class Registered:
    """ONNX Runtime, as far as it makes an allocator; it keeps the options that it was given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails: str = "") -> None:
        self.given: list[dict[str, str]] = []

        def register(provider: str, place: object, options: dict[str, str], regions: object) -> None:
            assert provider == "CUDAExecutionProvider"
            self.given.append(options)
            if fails:
                raise RuntimeError(fails)

        module = SimpleNamespace(**{**vars(onnxruntime()), "create_and_register_allocator_v2": register})
        monkeypatch.setattr(torch_memory, "onnxruntime", lambda: module)

    def call(self, name: str, kind: Any, argument: int | None) -> int | None:
        found: int | None = kind(int(self.given[0][name]))(argument)
        return found


def test_onnx_runtime_takes_from_torchs_pool_and_gives_back(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def alloc(size: int, device: int) -> int:
        asked.append((size, device))
        return 4096

    monkeypatch.setattr(torch.cuda, "caching_allocator_alloc", alloc)
    monkeypatch.setattr(torch.cuda, "caching_allocator_delete", lambda address: asked.append((address,)))
    ort, memory = Registered(monkeypatch), TorchMemory()
    for _ in range(2):
        memory.register("CUDAExecutionProvider", CUDA)
    assert len(ort.given) == 1
    assert ort.call("gpu_external_alloc", torch_memory._ALLOC, 300) == 4096
    ort.call("gpu_external_free", torch_memory._FREE, 4096)
    assert asked == [(300, 1), (4096,)]
    assert memory.raised() is None


def test_nothing_is_freed_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime frees the null pointer of a result without elements."""
    monkeypatch.setattr(torch.cuda, "caching_allocator_delete", lambda address: int(address))
    noise: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", noise.append)
    ort, memory = Registered(monkeypatch), TorchMemory()
    memory.register("CUDAExecutionProvider", CUDA)
    ort.call("gpu_external_free", torch_memory._FREE, None)
    ort.call("gpu_external_free", torch_memory._FREE, 0)
    assert memory.raised() is None
    assert not noise


def test_no_exception_leaves_a_callback(monkeypatch: pytest.MonkeyPatch) -> None:
    """ctypes would print it and leave it set in the interpreter."""
    monkeypatch.setattr(torch.cuda, "caching_allocator_delete", lambda address: 1 / 0)
    noise: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", noise.append)
    ort, memory = Registered(monkeypatch), TorchMemory()
    memory.register("CUDAExecutionProvider", CUDA)
    ort.call("gpu_external_free", torch_memory._FREE, 4096)
    assert isinstance(memory.raised(), ZeroDivisionError)
    assert not noise


def test_torchs_out_of_memory_error_is_raised_by_the_call(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: int) -> int:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(torch.cuda, "caching_allocator_alloc", no_memory)
    ort, memory = Registered(monkeypatch), TorchMemory()
    monkeypatch.setattr(streams, "TORCH_MEMORY", memory)
    memory.register("CUDAExecutionProvider", CPU)

    def runs_out(*_: object) -> None:
        assert ort.call("gpu_external_alloc", torch_memory._ALLOC, 300) is None
        raise RuntimeError("p != nullptr was false")

    compiled = on_stream(built(NEG), SessionStream(CPU, {}))
    own = compiled._own
    own.run = SessionStream(CPU, {}).around(runs_out)
    with pytest.raises(torch.OutOfMemoryError, match="2 GiB") as caught:
        compiled.run(torch.randn(3, 4))
    assert "nullptr" in str(caught.value.__cause__)
    own.run = SessionStream(CPU, {}).around(lambda *_: 1 / 0)
    with pytest.raises(Stopped, match="division"):  # the first error is not raised a second time
        compiled.run(torch.randn(3, 4))


def test_want_of_memory_that_onnx_runtime_gets_over_is_no_error(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: int) -> int:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.cuda, "caching_allocator_alloc", no_memory)
    ort, memory = Registered(monkeypatch), TorchMemory()
    monkeypatch.setattr(streams, "TORCH_MEMORY", memory)
    memory.register("CUDAExecutionProvider", CPU)
    around = SessionStream(CPU, {}).around
    around(lambda *_: ort.call("gpu_external_alloc", torch_memory._ALLOC, 300))()
    with pytest.raises(ZeroDivisionError):
        around(lambda *_: 1 / 0)()


def test_an_allocator_of_the_programs_serves_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    ort, memory = (
        Registered(monkeypatch, "An allocator for this device has already been registered for sharing."),
        TorchMemory(),
    )
    memory.register("CUDAExecutionProvider", CPU)
    memory.register("CUDAExecutionProvider", CPU)
    assert len(ort.given) == 1


def test_a_provider_that_does_not_load_is_not_silenced(monkeypatch: pytest.MonkeyPatch) -> None:
    Registered(monkeypatch, "CUDA Provider not available, can't get interface for it")
    with pytest.raises(RuntimeError, match="not available"):
        TorchMemory().register("CUDAExecutionProvider", CPU)


@pytest.mark.parametrize("name", ["gpu_mem_limit", "arena_extend_strategy", "gpu_external_alloc"])
def test_a_session_that_is_to_have_its_own_arena_has_it(name: str) -> None:
    assert TORCH_MEMORY.serves({"use_tf32"})
    assert not TORCH_MEMORY.serves({name, "use_tf32"})


def test_a_session_on_cuda_is_opened_in_torchs_memory(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    entries: dict[str, str] = {}
    opened: list[Any] = []
    real = importing.onnxruntime()

    class Recorded(real.SessionOptions):  # type: ignore[misc, name-defined]
        def add_session_config_entry(self, name: str, value: str) -> None:
            entries[name] = value

    class Session:
        def __init__(self, model: bytes, settings: Any, *, providers: list[Any], **_: Any) -> None:
            opened.append(providers)

        def get_providers(self) -> list[str]:
            return ["CUDAExecutionProvider"]

    module = SimpleNamespace(**{**vars(real), "SessionOptions": Recorded, "InferenceSession": Session})
    monkeypatch.setattr(session, "onnxruntime", lambda: module)
    registered: list[Any] = []
    monkeypatch.setattr(TORCH_MEMORY, "register", lambda *given: registered.append(given))
    target = providers.recorded_cuda_targets()[-1]
    open_session(built(NEG), target, CUDA)
    assert entries["session.use_env_allocators"] == "1"
    assert registered == [("CUDAExecutionProvider", CUDA)]
    ((name, given), host) = opened[0]
    assert (name, host) == ("CUDAExecutionProvider", "CPUExecutionProvider")
    assert given["user_compute_stream"] == "1"
    entries.clear()
    limited = dataclasses.replace(
        built(NEG), session=SessionOptions(provider_options={"gpu_mem_limit": "1000"}).resolved(on_cuda=True)
    )
    open_session(limited, target, CUDA)
    assert "session.use_env_allocators" not in entries
