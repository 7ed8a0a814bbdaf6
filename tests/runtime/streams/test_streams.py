"""Sessions on CUDA's streams, tested on the CPU with streams that only record calls: order, results and their end."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_streams import FakeCuda
from stream_graphs import CPU, CUDA, NEG, built, on_stream
from torch import nn

from ort_dynamo.cache.open_island import CACHE
from ort_dynamo.graph.boundary import ValueSpec
from ort_dynamo.runtime import binding, processes
from ort_dynamo.runtime.compiled_graph import open_graph
from ort_dynamo.runtime.installed.providers import find_target
from ort_dynamo.runtime.streams import SessionStream
from ort_dynamo.runtime.torch_memory import TORCH_MEMORY
from ort_dynamo.testing import patch_facts

# -- order -------------------------------------------------------------------------------------------------------------


def test_a_call_on_the_sessions_stream_waits_for_nothing(cuda: FakeCuda) -> None:
    x = torch.randn(3, 4)
    (y,) = on_stream(built(NEG), SessionStream(CPU, {})).run(x)
    assert torch.equal(y, -x)
    assert cuda.notes == []


def test_a_call_on_another_stream_is_between_two_waits_on_the_device(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = on_stream(built(NEG), SessionStream(CPU, {})).run
    cuda.current = cuda.stream_at(9)
    allocated: list[int] = []
    empty = torch.empty

    def noted(*args: Any, **kwargs: Any) -> torch.Tensor:
        allocated.append(cuda.current.cuda_stream)
        return empty(*args, **kwargs)

    run.__globals__["empty"] = noted
    own_run = run.__globals__["own"].run
    run.__globals__["own"].run = lambda *call: (own_run(*call), cuda.notes.append(f"left {cuda.current.cuda_stream}"))
    run(torch.randn(3, 4))
    assert cuda.notes == ["0 waits for 9", "9 waits for 0", "left 9"]
    assert allocated == [9], "results belong to the caller's stream"


def test_the_session_runs_on_its_own_stream(cuda: FakeCuda) -> None:
    stream, seen = SessionStream(CPU, {}), []
    around = stream.around(lambda *_: seen.append(cuda.current.cuda_stream))
    around()
    cuda.current = cuda.stream_at(9)
    around()
    assert seen == [0, 0]
    assert cuda.current.cuda_stream == 9


def test_the_caller_waits_also_for_a_run_that_fails(cuda: FakeCuda) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("no")

    around = SessionStream(CPU, {}).around(fails)
    cuda.current = cuda.stream_at(9)
    with pytest.raises(RuntimeError, match="no"):
        around()
    assert cuda.notes == ["0 waits for 9", "9 waits for 0"]


@pytest.mark.parametrize("devices", [1, 2])
def test_the_programs_device_stays_the_current_one(cuda: FakeCuda, devices: int) -> None:
    cuda.devices = devices
    SessionStream(CUDA, {}).around(lambda *_: cuda.notes.append("run"))()
    assert cuda.notes == (["run"] if devices == 1 else ["device cuda:1", "run", "device before"])


def test_a_session_is_opened_on_its_stream_and_device(cuda: FakeCuda) -> None:
    cuda.current = cuda.stream_at(7)
    stream = SessionStream(CUDA, {})
    cuda.current = cuda.stream_at(8)
    with stream.opening():
        assert cuda.current.cuda_stream == 7
    assert cuda.notes == ["device cuda:1", "device before"]
    assert cuda.current.cuda_stream == 8


# -- results in torch's memory -----------------------------------------------------------------------------------------

SHAPES = {
    "named": ("g (float[n, 4] x) => (float[n, 4] y) { y = Identity (x) }", lambda x: x),
    "turned": ("g (float[n, 4] x) => (float[4, n] y) { y = Transpose <perm = [1, 0]> (x) }", lambda x: x.t()),
    "fixed": ("g (float[3, 4] x) => (float[3, 4] y) { y = Neg (x) }", lambda x: -x),
    "twice": ('g (float[n, 4] x) => (float["2*n", 4] y) { y = Concat <axis = 0> (x, x) }', lambda x: torch.cat((x, x))),
}


@pytest.mark.parametrize("name", SHAPES)
def test_results_are_torchs_own_tensors(cuda: FakeCuda, name: str) -> None:
    text, expected = SHAPES[name]
    compiled = on_stream(built(text), SessionStream(CPU, {}))
    compiled.run.__globals__["from_dlpack"] = None
    x = torch.randn(3, 4)
    (y,) = compiled.run(x)
    assert torch.equal(y, expected(x))
    assert y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


@pytest.mark.parametrize("rows", [0, 3])
def test_bools_orders_and_empty_results_are_filled(cuda: FakeCuda, rows: int) -> None:
    text = """g (float[n, 4] x) => (bool[n, 4] a, float[4, n] b) {
        zero = Constant <value = float {0.0}> () a = Greater (x, zero) b = Transpose <perm = [1, 0]> (x) }"""
    graph = built(text, outputs=(ValueSpec(torch.bool), ValueSpec(torch.float32, (1, 0))))
    x = torch.randn(rows, 4)
    above, same = on_stream(graph, SessionStream(CPU, {})).run(x)
    assert torch.equal(above, x > 0)
    assert torch.equal(same, x)


def test_results_of_sizes_that_only_data_decides_are_copied_on_the_callers_stream(cuda: FakeCuda) -> None:
    graph = built("g (float[n] x) => (int64[1, found] y) { y = NonZero (x) }", outputs=(ValueSpec(torch.int64),))
    run = on_stream(graph, SessionStream(CPU, {})).run
    cuda.current = cuda.stream_at(9)
    (y,) = run(torch.tensor([0.0, 2.0, 0.0, 3.0]))
    assert y.tolist() == [[1, 3]]
    assert cuda.notes == ["0 waits for 9", "9 waits for 0", "0 waits for 9"]


@pytest.fixture
def like_cuda(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """The CPU, taken for a device with streams."""
    patch_facts(monkeypatch, computes_on_streams=True)
    monkeypatch.setattr(TORCH_MEMORY, "serves", lambda _: False)
    CACHE.clear()
    return cuda


def test_a_session_of_a_stream_is_held(like_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[object] = []
    monkeypatch.setattr(SessionStream, "hold", lambda self, session: held.append(session))
    compiled = open_graph(built(NEG), find_target("cpu"), CPU)
    assert held == [compiled._own.session]


def trained(step: Callable[..., torch.Tensor], model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    step(x).square().mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_model_trains_with_results_in_torchs_memory(like_cuda: FakeCuda, dynamic: bool) -> None:
    model = nn.Sequential(
        nn.Conv1d(2, 3, 3), nn.BatchNorm1d(3), nn.GELU(), nn.Dropout(0.5), nn.Flatten(), nn.LazyLinear(4)
    )
    model(torch.randn(3, 2, 8))
    compiled = torch.compile(model, backend="ort_train", dynamic=dynamic, options={"placement": "onnxruntime"})
    for rows in (3, 5):
        x = torch.randn(rows, 2, 8)
        expected = trained(model, model, x)
        for ours, eager in zip(trained(compiled, model, x), expected, strict=True):
            torch.testing.assert_close(ours, eager)
    assert like_cuda.notes, "sessions were opened on a stream"


def test_the_public_crossing_fills_torchs_memory(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    binding.crossing.cache_clear()
    monkeypatch.setattr(binding, "binding", SimpleNamespace)
    try:
        compiled = on_stream(built(NEG), SessionStream(CPU, {}))
        compiled.run.__globals__["from_dlpack"] = None
        x = torch.randn(3, 4)
        assert torch.equal(compiled.run(x)[0], -x)
    finally:
        binding.crossing.cache_clear()


class Wrapped:
    """An InferenceSession, as far as it holds another object."""

    def __init__(self, freed: Callable[[], None]) -> None:
        self._sess = Freed()
        weakref.finalize(self._sess, freed)


class Freed:
    """An object that weak references can watch."""


def test_a_session_is_freed_when_its_stream_has_done_its_work(cuda: FakeCuda) -> None:
    session = Wrapped(lambda: cuda.notes.append("freed"))
    SessionStream(CPU, {}).hold(session)
    assert cuda.notes == []
    del session
    assert cuda.notes == ["the host waits for 0", "freed"]


def test_a_session_that_is_dropped_in_a_recording_is_freed_later(cuda: FakeCuda) -> None:
    stream = SessionStream(CPU, {})
    first, second = (Wrapped(partial(cuda.notes.append, f"freed {index}")) for index in range(2))
    stream.hold(first)
    stream.hold(second)
    cuda.captures = True
    del first
    assert cuda.notes == []
    cuda.captures = False
    del second
    assert cuda.notes[:2] == ["the host waits for 0"] * 2
    assert sorted(cuda.notes[2:]) == ["freed 0", "freed 1"]


def test_a_forked_child_frees_no_copy_of_a_session(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    session = Wrapped(lambda: None)
    SessionStream(CPU, {}).hold(session)
    monkeypatch.setattr(processes, "current", processes.current + 1)
    del session
    assert cuda.notes == []


def test_the_interpreters_end_frees_no_session_on_cuda() -> None:
    from ort_dynamo.runtime import processes

    class Session:
        pass

    one = Session()
    processes.keep_alive_at_exit(one)
    assert one in processes._staying
    processes._never_freed(processes._staying)
    assert not processes._staying
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(one))
