"""Opening sessions and running them on torch's tensors."""

from __future__ import annotations

import dataclasses
import inspect
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx_ir as ir
import pytest
import torch
from fake_streams import fake_cuda
from forked import run_program

from ort_dynamo.cache.open_island import CACHE
from ort_dynamo.errors import InvalidOptionError, ProviderNotAvailableError, SessionError
from ort_dynamo.graph.boundary import ValueSpec, fed
from ort_dynamo.graph.build import BuildRecord, BuiltGraph
from ort_dynamo.graph.dtypes import TORCH_TO_ONNX
from ort_dynamo.options.groups import SessionOptions
from ort_dynamo.runtime import arena, binding, session
from ort_dynamo.runtime.compiled_graph import CompiledGraph, open_graph
from ort_dynamo.runtime.installed import importing, providers
from ort_dynamo.runtime.installed.providers import find_target
from ort_dynamo.runtime.session import open_session
from ort_dynamo.targets.target import Target

CPU = torch.device("cpu")
HEADER = '<ir_version: 10, opset_import: ["" : 20]>\n'


def graph(text: str, inputs: list[ValueSpec], outputs: list[ValueSpec]) -> CompiledGraph:
    return open_graph(built("test", HEADER + text, inputs, outputs), find_target("cpu"), CPU)


def built(name: str, text: str, inputs: Sequence[ValueSpec], outputs: Sequence[ValueSpec]) -> BuiltGraph:
    model = ir.to_proto(ir.from_onnx_text(text)).SerializeToString()
    settings = SessionOptions().resolved()
    return BuiltGraph(
        name=name,
        model=model,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        session=settings,
        dtypes=frozenset(),
        in_order=False,
        keyable=True,
        origins={},
        record=BuildRecord(0, (), {}),
    )


@pytest.mark.parametrize(
    "dtype",
    TORCH_TO_ONNX,
    ids=str,
)
def test_every_dtype_goes_through_unchanged(dtype: torch.dtype) -> None:
    name = {torch.float32: "float", torch.float64: "double"}.get(dtype, str(dtype).removeprefix("torch."))
    run = graph(
        f"g ({name}[n, m] x) => ({name}[n, m] y) {{ y = Identity (x) }}", [ValueSpec(dtype)], [ValueSpec(dtype)]
    )
    x = (torch.randn(3, 4) * 3).to(dtype)
    (y,) = run(x)
    assert y.dtype is dtype
    assert torch.equal(y, x)
    (empty,) = run(x[:0])
    assert empty.dtype is dtype
    assert empty.shape == (0, 4)


def test_inputs_are_not_copied_and_outputs_belong_to_torch() -> None:
    run = graph(
        "g (float[n] x) => (float[n] y) { y = Neg (x) }", [ValueSpec(torch.float32)], [ValueSpec(torch.float32)]
    )
    x = torch.ones(4)
    (first,) = run(x)
    x.add_(1)  # the session holds no copy of the old values
    (second,) = run(x)
    assert first.tolist() == [-1] * 4
    assert second.tolist() == [-2] * 4
    del run
    assert second.tolist() == [-2] * 4


def test_permuted_memory_goes_in_and_out_as_its_permutation() -> None:
    spec = ValueSpec(torch.float32, order=(0, 2, 1))
    run = graph("g (float[a, b, c] x) => (float[a, b, c] y) { y = Neg (x) }", [spec], [spec])
    x = torch.randn(2, 3, 4).permute(0, 2, 1)
    (y,) = run(x)
    assert torch.equal(y, -x)
    assert y.stride() == x.stride()
    (z,) = run(x.contiguous())  # not as promised: copied, still right
    assert torch.equal(z, -x)


def test_promised_strides_with_gaps_are_kept() -> None:
    run = graph(
        "g (float[a, b] x) => (float[a, b] y) { y = Neg (x) }",
        [ValueSpec(torch.float32)],
        [ValueSpec(torch.float32, strides=(8, 2))],
    )
    (y,) = run(torch.ones(3, 4))
    assert y.stride() == (8, 2)
    assert torch.equal(y, -torch.ones(3, 4))


def test_numbers_are_fed_as_scalars() -> None:
    run = graph(
        "g (int64 n) => (int64[m] y) <int64 zero = {0}, int64 one = {1}> { y = Range (zero, n, one) }",
        [ValueSpec(torch.int64, is_number=True)],
        [ValueSpec(torch.int64)],
    )
    assert run(3)[0].tolist() == [0, 1, 2]
    assert run(0)[0].tolist() == []


def test_numbers_are_fed_as_rows_of_an_empty_matrix() -> None:
    spec = ValueSpec(torch.int64, is_number=True, as_rows=True)
    run = graph(
        "g (int64[n, 0] rows, float[1] x) => (float[n] y) { shape = Shape <start = 0, end = 1> (rows)"
        " y = Expand (x, shape) }",
        [spec, ValueSpec(torch.float32)],
        [ValueSpec(torch.float32)],
    )
    for number in (3, 0, 1 << 20):
        assert run(number, torch.ones(1))[0].shape == (number,) == fed(number, spec).shape[:1]


def test_the_code_of_a_run_checks_only_symbolic_sizes() -> None:
    permuted = ValueSpec(torch.float32, order=(1, 0))
    run = graph(
        "g (float[2, 3] x, float[n, 3] y) => (float[2, 3] z, float[n, 3] w) { z = Neg (x) w = Neg (y) }",
        [permuted, ValueSpec(torch.float32)],
        [permuted, ValueSpec(torch.float32)],
    )
    code = inspect.getsource(run.run)
    assert code.startswith("def run(x0, x1):")
    assert code.count(".permute(1, 0)") == 2  # the first input's, the first output's
    assert "x1.numel()" in code
    assert "x0.numel()" not in code
    x, y = torch.randn(3, 2).t()._neg_view().t(), torch.randn(5, 3)[::2]
    z, w = run(x, y)
    torch.testing.assert_close(z, -x)
    torch.testing.assert_close(w, -y)


def test_one_graph_runs_in_many_threads() -> None:
    run = graph(
        "g (float[n] x) => (float[n] y) { y = Neg (x) }", [ValueSpec(torch.float32)], [ValueSpec(torch.float32)]
    )
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(50):
            (y,) = run(torch.full((1000,), float(number)))
            if not torch.equal(y, torch.full((1000,), -float(number))):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_model_the_runtime_refuses_is_a_session_error() -> None:
    text = (
        '<ir_version: 10, opset_import: ["" : 20, "no.such" : 1]>\ng (float[2] x) => (float[2] y) '
        "{ y = no.such.Op (x) }"
    )
    with pytest.raises(SessionError, match="cannot open the backward-abc graph"):
        open_session(built("backward-abc", text, [], []), find_target("cpu"), CPU)


def test_a_build_without_orders_and_arenas_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Private parts that only save time or memory may be missing; sessions then work without them."""
    real = importing.onnxruntime()
    hidden = ("ExecutionOrder", "create_and_register_allocator", "OrtArenaCfg")
    poorer = SimpleNamespace(**{name: value for name, value in vars(real).items() if name not in hidden})
    entries: list[str] = []

    class Recorded(real.SessionOptions):
        def add_session_config_entry(self, name: str, value: str) -> None:
            entries.append(name)
            super().add_session_config_entry(name, value)

    poorer.SessionOptions = Recorded
    for module in (session, arena, binding):
        monkeypatch.setattr(module, "onnxruntime", lambda: poorer)
    monkeypatch.setattr(session, "ARENA", arena.SharedArena())
    torch._dynamo.reset()
    CACHE.clear()
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))
    x = torch.randn(4, 3)
    model(x).sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    torch.compile(model, backend="ort_train")(x).sum().backward()
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, grad)
    assert entries
    assert "session.use_env_allocators" not in entries
    CACHE.clear()


def compiled_with(options: dict[str, str]) -> torch.Tensor:
    return torch.compile(torch.sin, backend="ort_train", options={"session_options": {"provider_options": options}})(
        torch.ones(2)
    )


def test_a_provider_option_that_the_cpu_does_not_know_is_refused_with_its_provider() -> None:
    with pytest.raises(
        torch._dynamo.exc.BackendCompilerFailed, match="CPUExecutionProvider has no option 'arena'"
    ) as raised:
        compiled_with({"arena": "1"})
    assert isinstance(raised.value.inner_exception, InvalidOptionError)


def test_options_of_cuda_are_left_out_on_the_cpu() -> None:
    torch.testing.assert_close(compiled_with({"gpu_mem_limit": "1000"}), torch.sin(torch.ones(2)))


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ('Unknown provider option: "gpu_mem_limt".', InvalidOptionError),
        ('Failed to parse value: "lots"', InvalidOptionError),
        ("This is an invalid model.", SessionError),
    ],
)
def test_a_providers_error_about_its_options_is_raised(
    monkeypatch: pytest.MonkeyPatch, words: str, kind: type[Exception]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError(words)

    monkeypatch.setattr(importing.onnxruntime(), "InferenceSession", refuse)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as raised:
        compiled_with({"gpu_mem_limit": "lots"})
    assert isinstance(raised.value.inner_exception, kind)
    assert words in str(raised.value)


NEG = HEADER + "g (float[n] x) => (float[n] y) { y = Neg (x) }"


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Target]:
    """A target on CUDA, of which nothing is known but that it is tried."""
    monkeypatch.setattr(session, "provider_options", lambda *_: {})
    monkeypatch.setattr(session.TORCH_MEMORY, "register", lambda *_: None)
    monkeypatch.setattr(providers, "_cuda_misfit", lambda: None)
    with fake_cuda(monkeypatch):
        yield dataclasses.replace(find_target("cpu"), provider="CUDAExecutionProvider", device_type="cuda")


def open_on_cuda(target: Target, monkeypatch: pytest.MonkeyPatch, make: Callable[..., object]) -> None:
    module = SimpleNamespace(**{**vars(importing.onnxruntime()), "InferenceSession": make})
    monkeypatch.setattr(session, "onnxruntime", lambda: module)
    specs = [ValueSpec(torch.float32)]
    open_session(built("test", NEG, specs, specs), target, torch.device("cuda"))


def test_a_fall_back_to_the_cpu_is_an_error(on_cuda: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importing.onnxruntime().InferenceSession

    def falls_back(model: bytes, settings: object, *, providers: list[object], **rest: object) -> object:
        return real(model, settings, providers=providers[1:], **rest)

    with pytest.raises(ProviderNotAvailableError, match=r"tensors on cuda, but it does not load .*doctor"):
        open_on_cuda(on_cuda, monkeypatch, falls_back)


@pytest.mark.parametrize(
    "said",
    [
        "CUDA_PATH is set but CUDA wasnt able to be loaded. Please install the correct version of CUDA",
        "Failed to load library libonnxruntime_providers_cuda.so with error: libcudnn.so.9: cannot open",
        "CUDA failure 35: CUDA driver version is insufficient for CUDA runtime version",
    ],
)
def test_a_provider_that_says_why_it_does_not_load_is_heard(
    on_cuda: Target, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    def raises(*given: object, **named: object) -> object:
        raise RuntimeError(said)

    with pytest.raises(ProviderNotAvailableError, match=f"it does not load: {said}") as caught:
        open_on_cuda(on_cuda, monkeypatch, raises)
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_refused_model_stays_a_refused_model(on_cuda: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(*given: object, **named: object) -> object:
        raise RuntimeError("This is an invalid model")

    with pytest.raises(SessionError, match="This is an invalid model"):
        open_on_cuda(on_cuda, monkeypatch, raises)


@pytest.mark.skipif(
    torch.cuda.is_available() or "CUDAExecutionProvider" not in importing.onnxruntime().get_available_providers(),
    reason="needs a build for CUDA on a machine without",
)
def test_onnx_runtimes_own_fall_back_is_an_error(on_cuda: Target) -> None:
    specs = [ValueSpec(torch.float32)]
    with pytest.raises(ProviderNotAvailableError, match="it does not load"):
        open_session(built("test", NEG, specs, specs), on_cuda, torch.device("cuda"))


FLUSHED = """
import sys, torch
torch.set_num_threads(2)
torch.set_flush_denormal(sys.argv[1] == "flush")
options = {"placement": "onnxruntime", "threads": 2}
product = torch.compile(lambda x, y: x * y, backend="ort_train", options=options)
x = torch.full((1 << 20,), 1e-38)
found = product(x, torch.full_like(x, 1e-3))
print(int(found.count_nonzero()), int((x[:1] * 1e-3).count_nonzero()))
"""


@pytest.mark.parametrize(("mode", "printed"), [("flush", "0 0"), ("keep", f"{1 << 20} 1")])
def test_sessions_and_torch_do_with_denormals_as_set_flush_denormal_says(mode: str, printed: str) -> None:
    ran = run_program(FLUSHED, mode)
    assert ran.stdout.strip() == printed, ran.stderr


def test_numbers_reach_a_session_on_the_cpu_under_any_default_device() -> None:
    run = torch.compile(lambda x: (x * x.shape[0]).sin(), backend="ort_train", dynamic=True)
    x = torch.randn(5, 3, requires_grad=True)
    with torch.device("meta"):
        result = run(x)
        result.backward(torch.ones(5, 3, device="cpu"))
    torch.testing.assert_close(result, (x * 5).sin())
    torch.testing.assert_close(x.grad, (x * 5).cos() * 5)


FOLDED = """
import sys, torch
torch.set_flush_denormal(sys.argv[1] == "flush")
added = torch.compile(
    lambda x: x + torch.full((2,), 1e-39) * 1.5, backend="ort_train", options={"placement": "onnxruntime"}
)
print(bool(added(torch.zeros(2)).any()))
"""


def test_a_stored_island_is_not_read_where_denormals_are_treated_otherwise(tmp_path: Path) -> None:
    cache = {**os.environ, "ORT_DYNAMO_CACHE_DIR": str(tmp_path)}
    assert run_program(FOLDED, "flush", env=cache).stdout == "False\n"
    assert run_program(FOLDED, "keep", env=cache).stdout == "True\n"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"enable_profiling": "False"}, r"'enable_profiling'\]\" cannot be 'False': expected a value of type bool"),
        ({"enable_profiling": 2}, "cannot be 2: expected a value of type bool"),
        ({"execution_mode": "fast"}, "cannot be 'fast': expected a value of type ExecutionMode"),
        ({"execution_mode": 7}, r"cannot be 7: expected a value of type ExecutionMode: 0 \(ORT_SEQUENTIAL\), 1"),
        ({"log_severity_level": 99}, "cannot be 99: expected an int from -1 to 4"),
        ({"inter_op_num_threads": -5}, "cannot be -5: expected an int from 0 to 4096"),
        ({"add_session_config_entry": 1}, "has no attribute 'add_session_config_entry'"),
    ],
)
def test_a_setting_of_the_wrong_kind_is_refused(given: dict[str, Any], text: str) -> None:
    run = torch.compile(torch.sin, backend="ort_train", options={"session_options": given})
    with pytest.raises(Exception, match=text):
        run(torch.ones(3))


def test_a_bool_may_be_a_number() -> None:
    options = {"session_options": {"enable_mem_pattern": 0, "execution_mode": 0}}
    run = torch.compile(torch.sin, backend="ort_train", options=options)
    torch.testing.assert_close(run(torch.ones(3)), torch.ones(3).sin())
