"""The device that `bench.cuda` measures, with its clock, streams and memory. The CPU has fewer of them."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.cuda_models import Scale

__all__ = ["Place", "resident_bytes"]


@dataclass(frozen=True)
class Place:
    """The device, the scale of the models, and the deadline.

    Attributes:
        device: the measured device.
        scale: the scale of the models.
        end: the time, by time.monotonic, after which no part may begin.
    """

    device: torch.device
    scale: Scale
    end: float

    @property
    def on_cuda(self) -> bool:
        return self.device.type == "cuda"

    def wait(self) -> None:
        """Wait for the device."""
        if self.on_cuda:
            torch.cuda.synchronize(self.device)

    def seconds(self, function: Callable[[], object], calls: int = 1) -> float:
        """Seconds of one call, by CUDA's events, from the first launch to the last result."""
        if not self.on_cuda:
            begin = time.perf_counter()
            for _ in range(calls):
                function()
            return (time.perf_counter() - begin) / calls
        begins, ends = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begins.record()
        for _ in range(calls):
            function()
        ends.record()
        ends.synchronize()
        return begins.elapsed_time(ends) / 1000 / calls

    def autocast(self, dtype: torch.dtype | None) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if dtype is None else torch.autocast(self.device.type, dtype)

    def new_stream(self) -> contextlib.AbstractContextManager[object]:
        """Be on another stream, which begins when the present one is done so far."""
        if not self.on_cuda:
            return contextlib.nullcontext()
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(stream)

    def delay(self) -> None:
        """Keep the current stream busy for some milliseconds: work that does not wait for it comes too early."""
        if self.on_cuda:
            torch.cuda._sleep(10_000_000)

    def allocated(self) -> int:
        """Bytes of torch's memory on the device that are in use; 0 on the CPU, where torch does not count."""
        self.wait()
        return torch.cuda.memory_allocated(self.device) if self.on_cuda else 0

    def peak(self, function: Callable[[], object]) -> int | None:
        """Bytes of torch's memory that a call takes at its peak over what was in use before; None on the CPU."""
        if not self.on_cuda:
            return None
        self.clean()
        before = self.allocated()
        torch.cuda.reset_peak_memory_stats(self.device)
        function()
        self.wait()
        return torch.cuda.max_memory_allocated(self.device) - before

    def clean(self) -> None:
        """Free unreferenced memory."""
        gc.collect()
        if self.on_cuda:
            torch.cuda.empty_cache()


def resident_bytes() -> int:
    """Bytes of the process that are in the machine's memory, pinned ones included; 0 where the system does not tell."""
    path = Path("/proc/self/statm")
    return int(path.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if path.exists() else 0
