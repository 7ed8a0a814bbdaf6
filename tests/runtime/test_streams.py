"""Sessions on CUDA's streams and in torch's memory, tested on the CPU with streams that only record calls."""

from __future__ import annotations

import ctypes
import dataclasses
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from types import SimpleNamespace
from typing import Any

import onnx_ir as ir
import pytest
import torch
from fake_streams import FakeCuda, fake_cuda
from torch import nn
from torch._dynamo.utils import counters

from ort_dynamo.cache.open_island import CACHE
from ort_dynamo.compilation.compiler import build_spec
from ort_dynamo.errors import SessionError
from ort_dynamo.graph.boundary import ValueSpec
from ort_dynamo.graph.build import BuildRecord, BuiltGraph
from ort_dynamo.options.groups import Options, SessionOptions
from ort_dynamo.runtime import binding, processes, session, streams, torch_memory
from ort_dynamo.runtime.compiled_graph import CompiledGraph, open_graph
from ort_dynamo.runtime.installed import importing, providers, severity
from ort_dynamo.runtime.installed.importing import onnxruntime
from ort_dynamo.runtime.installed.providers import find_target, provider_options
from ort_dynamo.runtime.session import open_session
from ort_dynamo.runtime.session_code import Stopped
from ort_dynamo.runtime.streams import SessionStream
from ort_dynamo.runtime.torch_memory import TORCH_MEMORY, TorchMemory
from ort_dynamo.targets.target import Target
from ort_dynamo.testing import patch_facts

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 1)
HEADER = '<ir_version: 10, opset_import: ["" : 20]>\n'
NEG = "g (float[n, 4] x) => (float[n, 4] y) { y = Neg (x) }"
F = ValueSpec(torch.float32)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    streams._stream_apart.cache_clear()
    with fake_cuda(monkeypatch) as fake:
        yield fake


def built(text: str, inputs: int = 1, outputs: tuple[ValueSpec, ...] = (F,)) -> BuiltGraph:
    return BuiltGraph(
        name="test",
        model=ir.to_proto(ir.from_onnx_text(HEADER + text)).SerializeToString(),
        inputs=(F,) * inputs,
        outputs=outputs,
        session=SessionOptions().resolved(),
        dtypes=frozenset(),
        in_order=False,
        keyable=True,
        origins={},
        record=BuildRecord(0, (), {}),
    )


def on_stream(graph: BuiltGraph, stream: SessionStream) -> CompiledGraph:
    return CompiledGraph(graph, partial(open_session, graph, find_target("cpu"), CPU), CPU, stream)


# -- options -----------------------------------------------------------------------------------------------------------


def options_of(stream: SessionStream, **given: Any) -> dict[str, str]:
    return provider_options(CUDA, SessionOptions(**given).resolved(on_cuda=True), stream.address)


def test_a_session_gets_the_current_stream_and_device(cuda: FakeCuda) -> None:
    cuda.current = cuda.stream_at(77)
    found = options_of(SessionStream(CUDA, {}))
    assert (found["user_compute_stream"], found["device_id"]) == ("77", "1")


def test_the_first_device_is_not_named(cuda: FakeCuda) -> None:
    """ONNX Runtime would print a warning: the first device is the default."""
    for device in ("cuda", "cuda:0"):
        assert "device_id" not in provider_options(torch.device(device), SessionOptions().resolved(on_cuda=True))


def test_the_default_stream_has_an_address_that_onnx_runtime_takes_for_one(cuda: FakeCuda) -> None:
    assert cuda.current.cuda_stream == 0
    assert options_of(SessionStream(CUDA, {}))["user_compute_stream"] == "1"


def test_a_session_that_is_recorded_gets_a_stream_of_its_own_for_all_of_a_device(cuda: FakeCuda) -> None:
    first, second = (SessionStream(CUDA, {}, apart=True).address for _ in range(2))
    assert first == second == "101"
    assert SessionStream(torch.device("cuda", 0), {}, apart=True).address == "102"


def test_a_stream_among_the_programs_options_is_taken(cuda: FakeCuda) -> None:
    given = {"user_compute_stream": "5"}
    assert SessionStream(CUDA, given).address == "5"
    assert options_of(SessionStream(CUDA, given), provider_options=given)["user_compute_stream"] == "5"


def searching(searches: bool) -> AbstractContextManager[None]:
    """cuDNN's search as given; in a context, since torch's test utilities forbid to assign it."""
    context: Any = torch.backends.cudnn.flags(enabled=True, benchmark=searches)
    return context


@pytest.mark.parametrize("searches", [False, True])
def test_the_search_for_convolutions_is_torchs(searches: bool) -> None:
    with searching(searches):
        found = provider_options(CUDA, SessionOptions().resolved(on_cuda=True))
    assert found["cudnn_conv_algo_search"] == ("EXHAUSTIVE" if searches else "HEURISTIC")
    assert found["cudnn_conv_use_max_workspace"] == "1"


@pytest.fixture
def precisions() -> Iterator[Any]:
    backends: Any = torch.backends
    kept = torch.get_float32_matmul_precision(), backends.cudnn.conv.fp32_precision
    yield backends
    torch.set_float32_matmul_precision(kept[0])
    backends.cudnn.conv.fp32_precision = kept[1]


@pytest.mark.parametrize(
    ("products", "convolutions", "expected"), [("high", "tf32", "1"), ("highest", "tf32", "0"), ("high", "ieee", "0")]
)
def test_tf32_is_on_where_torch_has_it_in_all(precisions: Any, products: str, convolutions: str, expected: str) -> None:
    torch.set_float32_matmul_precision(products)
    precisions.cudnn.conv.fp32_precision = convolutions
    assert provider_options(CUDA, SessionOptions().resolved(on_cuda=True))["use_tf32"] == expected


def test_the_programs_options_override_torchs(cuda: FakeCuda) -> None:
    given = {"use_tf32": "1", "cudnn_conv_algo_search": "DEFAULT"}
    found = options_of(SessionStream(CUDA, {}), provider_options=given)
    assert {name: found[name] for name in given} == given


def key_context(target: Target) -> str:
    device = CUDA if target.facts.computes_on_streams else CPU
    return repr(build_spec(Options(), target, device, "forward"))


def test_torchs_settings_are_in_the_key_on_cuda_alone(precisions: Any) -> None:
    targets = providers.recorded_cpu_targets()[-1], providers.recorded_cuda_targets()[-1]
    contexts = [tuple(map(key_context, targets))]
    torch.set_float32_matmul_precision("high")
    contexts.append(tuple(map(key_context, targets)))
    with searching(True):
        contexts.append(tuple(map(key_context, targets)))
    assert len({cpu for cpu, _ in contexts}) == 1
    assert len({on_cuda for _, on_cuda in contexts}) == 3
    torch.use_deterministic_algorithms(True)
    try:
        with searching(True):
            contexts.append(tuple(map(key_context, targets)))
    finally:
        torch.use_deterministic_algorithms(False)
    assert len({cpu for cpu, _ in contexts}) == 2
    assert len({on_cuda for _, on_cuda in contexts}) == 4


def test_another_precision_compiles_anew(precisions: Any) -> None:
    compiled = torch.compile(torch.sin, backend="ort_train")
    x = torch.ones(2)
    compiled(x)
    torch.set_float32_matmul_precision("high")
    compiled(x)
    assert counters["stats"]["unique_graphs"] == 2, "Dynamo guards it"


def test_results_are_put_on_the_device_as_the_provider_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Named(SimpleNamespace):
        cpu, cuda, default_memory = staticmethod(lambda: 0), staticmethod(lambda: 1), staticmethod(lambda: 0)

        def __new__(cls, *parts: int) -> Any:
            return parts

    class Vendors(Named):
        def vendor_id(self) -> int:
            return 0

    for kind, expected in ((Named, (1, 0, 1)), (Vendors, (1, 0, 0x10DE, 1))):
        monkeypatch.setattr(binding, "binding", lambda kind=kind: SimpleNamespace(OrtDevice=kind))
        assert binding._device_place(CUDA) == expected
        assert binding._device_place(CPU) == (0, 0, 0)


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


# -- memory ------------------------------------------------------------------------------------------------------------


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


class Severities:
    """ONNX Runtime, as far as it opens sessions: notes each severity of the default logger, and each session opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails: bool = False) -> None:
        self.notes: list[object] = []

        def session_opens(*_: Any, **__: Any) -> Any:
            self.notes.append("session")
            if fails:
                raise RuntimeError("no such device")
            return SimpleNamespace(get_providers=lambda: ["CUDAExecutionProvider"])

        module = SimpleNamespace(**vars(importing.onnxruntime()))
        module.InferenceSession, module.set_default_logger_severity = session_opens, self.notes.append
        for user in (session, severity):
            monkeypatch.setattr(user, "onnxruntime", lambda: module)
        monkeypatch.setattr(TORCH_MEMORY, "register", lambda *_: None)
        monkeypatch.setattr(SessionStream, "hold", lambda *_: None)
        monkeypatch.setattr(session, "keep_alive_at_exit", lambda _: None)

    def of(self, index: int, **given: Any) -> list[object]:
        graph = dataclasses.replace(built(NEG), session=SessionOptions(**given).resolved(on_cuda=True))
        open_session(graph, providers.recorded_cuda_targets()[-1], torch.device("cuda", index))
        return self.notes


def test_no_warning_is_printed_for_a_session_that_names_its_device(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Severities(monkeypatch).of(1) == [3, "session", 2]


def test_the_default_logger_is_let_alone_where_nothing_is_to_be_silenced(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Severities(monkeypatch).of(0) == ["session"]
    assert Severities(monkeypatch).of(1, session_options={"log_severity_level": 0}) == ["session"]


def test_warnings_are_back_after_a_session_that_does_not_open(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Severities(monkeypatch, fails=True)
    with pytest.raises(SessionError, match="no such device"):
        found.of(1)
    assert found.notes == [3, "session", 2]


def test_warnings_are_back_when_the_last_of_several_sessions_is_open(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Severities(monkeypatch)
    with severity.errors_only():
        found.of(1)
        assert found.notes == [3, 3, "session"]
    assert found.notes[-1] == 2


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
