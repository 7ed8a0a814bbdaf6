"""Tests of sessions on a CUDA device: streams, memory, copies, precision, errors. They need a device."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters

from ort_dynamo.errors import InvalidOptionError

pytestmark = pytest.mark.cuda

NAN = float("nan")
BUSY = 20_000_000
"""Cycles that keep a stream busy for about ten milliseconds: work that does not wait for it comes too early."""


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(function, backend="ort_train", options={"fallback": "error", **options}, fullgraph=True)


def squares(x: Tensor) -> Tensor:
    return (x * x + 1).sqrt()


def late(x: Tensor) -> Tensor:
    """A copy of `x` that is there some milliseconds later on the current stream, and NaN until then."""
    y = torch.full_like(x, NAN)
    torch.cuda._sleep(BUSY)
    return y.copy_(x)


def overwrite_free_memory(like: Tensor) -> None:
    """Fill the allocator's free blocks of a tensor's size: a tensor that was freed too early becomes NaN."""
    for _ in range(4):
        torch.full_like(like, NAN)


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    """Have torch's precision as it was, and no error of the device left for the next test."""
    kept = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(kept)
    torch.cuda.synchronize()


def trained(step: Callable[..., Tensor], module: nn.Module, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(step(x).square().mean(), list(module.parameters())))


def test_a_model_trains_as_in_eager() -> None:
    module = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4)).cuda()
    x = torch.randn(8, 16, device="cuda")
    for ours, eager in zip(trained(compiled(module), module, x), trained(module, module, x), strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-6)
    assert counters["ort_train"]["native_nodes"] > 0


# -- streams -----------------------------------------------------------------------------------------------------------


def test_a_session_waits_for_the_default_stream_and_that_for_it() -> None:
    step, x = compiled(squares), torch.randn(1 << 20, device="cuda")
    step(x)
    for _ in range(3):
        torch.testing.assert_close(step(late(x)) * 2, squares(x) * 2)


def test_a_session_of_the_default_stream_serves_another() -> None:
    step, x = compiled(squares), torch.randn(1 << 20, device="cuda")
    step(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        result = step(late(x)) * 2
        overwrite_free_memory(x)
    torch.cuda.current_stream().wait_stream(stream)
    torch.testing.assert_close(result, squares(x) * 2)


def test_a_session_of_another_stream_serves_the_default_one() -> None:
    step, x = compiled(squares), torch.randn(1 << 20, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(x)
    torch.testing.assert_close(step(late(x)) * 2, squares(x) * 2)


def test_a_result_is_retained_for_the_stream_that_it_is_recorded_on() -> None:
    step, x = compiled(squares), torch.randn(1 << 20, device="cuda")
    expected, result, stream = squares(x), step(x), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(BUSY)
        doubled = result * 2
    result.record_stream(stream)
    del result
    overwrite_free_memory(x)
    torch.cuda.synchronize()
    torch.testing.assert_close(doubled, expected * 2)


def test_a_call_does_not_wait_for_the_device() -> None:
    step, x = compiled(squares), torch.randn(1024, device="cuda")
    for _ in range(3):
        step(x)
    torch.cuda.synchronize()
    torch.cuda._sleep(50 * BUSY)
    done = torch.cuda.Event()
    step(x)
    done.record()
    assert not done.query(), "the host came back before the device did"


# -- memory ------------------------------------------------------------------------------------------------------------


def test_torch_counts_a_sessions_memory() -> None:
    step, x = compiled(lambda x: (x[:, None] * x[None, :]).cumsum(1).sum(0)), torch.randn(2048, device="cuda")
    for _ in range(3):
        step(x)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step(x)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() - before >= 2048 * 2048 * 4


def test_want_of_memory_is_torchs_error_and_the_next_step_runs() -> None:
    step = torch.compile(lambda x: (x[:, None] * x[None, :]).cumsum(1).sum(0), backend="ort_train", dynamic=False)
    memory = torch.cuda.get_device_properties(0).total_memory
    with pytest.raises(torch.OutOfMemoryError):
        step(torch.randn(math.isqrt(2 * memory // 4), device="cuda"))  # the matrix of products is twice the memory
    x = torch.randn(64, device="cuda")
    torch.testing.assert_close(step(x), (x[:, None] * x[None, :]).cumsum(1).sum(0), rtol=1e-4, atol=1e-3)


# -- torch's streams and memory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("precision", "is_coarse"), [("highest", False), ("high", True)])
def test_tf32_is_as_torch_has_it(precision: str, is_coarse: bool) -> None:
    if is_coarse and torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("the device has no TF32")
    torch.set_float32_matmul_precision(precision)
    x, y = (torch.randn(512, 512, device="cuda") for _ in range(2))
    exact = x.double() @ y.double()
    apart = ((compiled(torch.matmul)(x, y) - exact).norm() / exact.norm()).item()
    assert (apart > 5e-5) == is_coarse, apart


def test_deterministic_gradients_are_equal_bit_by_bit() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        table = torch.randn(16, 64, device="cuda", requires_grad=True)
        index = torch.randint(16, (4096,), device="cuda")
        step = compiled(lambda table: F.embedding(index, table).sin().sum())
        first, *others = [torch.autograd.grad(step(table), table)[0] for _ in range(4)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(first, other) for other in others)


# -- devices and errors ------------------------------------------------------------------------------------------------


def test_the_programs_device_stays_the_current_one() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one device")
    x = torch.randn(8, device="cuda:1")
    step = compiled(squares)
    for _ in range(2):
        torch.testing.assert_close(step(x), squares(x))
        assert torch.cuda.current_device() == 0


def test_an_option_that_the_provider_does_not_know_is_named() -> None:
    with pytest.raises(BackendCompilerFailed, match="gpu_mem_limt") as caught:
        compiled(squares, session_options={"provider_options": {"gpu_mem_limt": "1"}})(torch.ones(2, device="cuda"))
    assert isinstance(caught.value.inner_exception, InvalidOptionError)


# -- the checks of the benchmark, on small models ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        *("copies", "memcpy nodes", "two streams", "two threads", "cuda graphs", "flat memory"),
        *(f"{dtype} {model}" for dtype in ("float32", "bfloat16") for model in ("mlp", "gpt", "bert", "resnet18")),
    ],
)
def test_a_check_of_the_benchmark_passes(name: str) -> None:
    checks = pytest.importorskip("bench.cuda_checks", reason="bench is importable under `python -m pytest` only")
    place = pytest.importorskip("bench.cuda_device").Place(torch.device("cuda", 0), "tiny", time.monotonic() + 600)
    found = checks.CHECKS[name](place)
    assert found["ok"], found
