"""Tests of a session's options on CUDA: its stream, its device and torch's settings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_streams import FakeCuda
from stream_graphs import CPU, CUDA
from torch._dynamo.utils import counters

from ort_dynamo.compilation.compiler import build_spec
from ort_dynamo.options.groups import Options, SessionOptions
from ort_dynamo.runtime import binding
from ort_dynamo.runtime.installed import providers
from ort_dynamo.runtime.installed.providers import provider_options
from ort_dynamo.runtime.streams import SessionStream
from ort_dynamo.targets.target import Target


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
