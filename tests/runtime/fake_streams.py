"""Stands in for torch.cuda's streams and devices where there is no device: it records the calls in order."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from ort_dynamo.cache.open_island import CACHE

__all__ = ["FakeCuda", "FakeStream", "fake_cuda"]


@dataclass(eq=False)
class FakeStream:
    cuda_stream: int
    notes: list[str]

    def wait_stream(self, other: FakeStream) -> None:
        self.notes.append(f"{self.cuda_stream} waits for {other.cuda_stream}")

    def synchronize(self) -> None:
        self.notes.append(f"the host waits for {self.cuda_stream}")


@dataclass
class FakeCuda:
    """Records the calls to CUDA.

    Attributes:
        devices: how many there are.
        current: the current stream.
        captures: whether the current stream is being recorded.
        notes: the calls, in order.
    """

    devices: int = 1
    notes: list[str] = field(default_factory=list)
    made: int = 100
    captures: bool = False

    def __post_init__(self) -> None:
        self.current = self.stream_at(0)

    def stream_at(self, address: int) -> FakeStream:
        return FakeStream(address, self.notes)

    def new_stream(self, device: Any = None) -> FakeStream:
        self.made += 1
        return self.stream_at(self.made)

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    @contextlib.contextmanager
    def device(self, device: Any) -> Iterator[None]:
        self.notes.append(f"device {device}")
        yield
        self.notes.append("device before")


@contextlib.contextmanager
def fake_cuda(patch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """Replace the parts of torch.cuda that `ort_dynamo.runtime` uses by a fake, until all sessions are dropped."""
    fake = FakeCuda()
    # Lightning sets it when it is imported, for good. torch would then ask `device_count` whether CUDA is available.
    patch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK", raising=False)
    patch.setattr(torch.cuda, "current_stream", lambda device=None: fake.current)
    patch.setattr(torch.cuda, "stream", fake.stream)
    patch.setattr(torch.cuda, "device", fake.device)
    patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: fake.captures)
    patch.setattr(torch.cuda, "device_count", lambda: fake.devices)
    patch.setattr(torch.cuda, "Stream", fake.new_stream)
    patch.setattr(torch.cuda, "ExternalStream", lambda address, device: fake.stream_at(address))
    yield fake
    torch._dynamo.reset()
    CACHE.clear()
    gc.collect()
