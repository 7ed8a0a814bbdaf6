"""Print the memory in use and the time at each phase of a step."""

from __future__ import annotations

import logging
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ort_dynamo.training.ortmodule.logger import rank_and_world_size
from ort_dynamo.training.torch_internals import after_backward, tree_leaves

__all__ = ["StepReport"]

_MIB = 2**20


class StepReport:
    """Reports the steps of one module: the first ten, and then those whose number is a power of two.

    A line has the memory of the CUDA device if the module is on one, as torch's allocator counts it, and that of the
    process otherwise; and the milliseconds since the line before, up to which the device has done its work. In several
    processes rank 0 reports.

    Args:
        module: the module; its parameters, buffers and gradients are counted, too.
        logger: gets the lines, at INFO, or at its own level if that is higher.
    """

    def __init__(self, module: nn.Module, logger: logging.Logger) -> None:
        self._module = module
        self._logger = logger
        self._step = 0
        self._last = time.perf_counter()

    def before_forward(self) -> None:
        """Report that a step begins."""
        self._line("pre_forward")

    def after_forward(self, outputs: Any) -> None:
        """Report the end of the forward, and have the backward through `outputs` reported, if there is one."""
        self._line("post_forward")
        first = next((one for one in tree_leaves(outputs) if isinstance(one, torch.Tensor) and one.requires_grad), None)
        if first is None:
            self._step += 1
        else:
            first.register_hook(self._in_backward)  # type: ignore[no-untyped-call]

    def _in_backward(self, _: torch.Tensor) -> None:
        self._line("pre_backward")
        after_backward(self._end_of_backward)

    def _end_of_backward(self) -> None:
        self._line("post_backward")
        self._step += 1

    def _line(self, phase: str) -> None:
        rank, _ = rank_and_world_size()
        if rank or (self._step >= 10 and self._step & (self._step - 1)):
            return
        device = next((p.device for p in self._module.parameters()), torch.device("cpu"))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        now = time.perf_counter()
        facts = [f"time (ms): {(now - self._last) * 1e3:.1f}", *_memory(device), *_sizes(self._module)]
        self._last = time.perf_counter()
        self._logger.log(
            max(logging.INFO, self._logger.level),
            "rank-%d step %d memory (MiB) | phase: %s | %s",
            rank,
            self._step,
            phase,
            " | ".join(facts),
        )


def _memory(device: torch.device) -> Iterator[str]:
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        for what, name in (("allocated", "allocated_bytes"), ("cached", "reserved_bytes")):
            yield f"{what}: {stats[f'{name}.all.current'] / _MIB:.0f}"
            yield f"max {what}: {stats[f'{name}.all.peak'] / _MIB:.0f}"
        yield f"inactive: {stats['inactive_split_bytes.all.current'] / _MIB:.0f}"
        yield f"max inactive: {stats['inactive_split_bytes.all.peak'] / _MIB:.0f}"
        return
    yield f"resident: {_resident() / _MIB:.0f}"
    yield f"max resident: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_UNIT / _MIB:.0f}"


_MAXRSS_UNIT = 1 if sys.platform == "darwin" else 1024
"""Bytes; getrusage(2) of either system."""


def _resident() -> int:
    """Bytes of the process in memory; their peak where the system has no /proc."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_UNIT


def _sizes(module: nn.Module) -> Iterator[str]:
    parameters = list(module.parameters())
    gradients = [p.grad for p in parameters if p.grad is not None]
    for what, tensors in (("param", parameters), ("grad", gradients), ("buffer", list(module.buffers()))):
        yield f"{what}: {sum(tensor.nbytes for tensor in tensors) / _MIB:.0f}"
