"""The contestants, eager, inductor and ort_train, compiled in the same way."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from bench.workloads import Workload

__all__ = ["BACKENDS", "SUBJECT", "TrainingStep", "compile_with", "why_absent"]

SUBJECT = "ort_train"

BACKENDS = ("eager", "inductor", SUBJECT)


def compile_with(
    backend: str, function: Callable[..., Any], options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """`function` as `backend` runs it; "eager" is torch without torch.compile. A graph break is an error."""
    if backend == "eager":
        return function
    return torch.compile(function, backend=backend, options=options, fullgraph=True, dynamic=False)


@cache
def why_absent(backend: str) -> str | None:
    """Give the reason why a backend cannot take part, or None. Inductor needs a C++ compiler on a CPU."""
    if backend != "inductor":
        return None
    try:
        compile_with(backend, lambda x: x.sin() + 1)(torch.ones(64))
    except Exception as error:  # any fault of the toolchain; the reason is printed with the results
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


class TrainingStep:
    """Trains a workload under one backend; a call is one step. The optimizer is AdamW in eager for every backend.

    Without `update` a step ends with the gradients.
    """

    def __init__(
        self, workload: Workload, backend: str, options: dict[str, Any] | None = None, *, update: bool = True
    ) -> None:
        self.workload = workload
        self._loss = compile_with(backend, workload.module, options)
        self._update = update
        self._optimizer = torch.optim.AdamW(workload.module.parameters(), lr=1e-4, foreach=True)

    def loss(self) -> torch.Tensor:
        """The forward alone."""
        loss: torch.Tensor = self._loss(*self.workload.batch)
        return loss

    def __call__(self) -> torch.Tensor:
        """The loss before the step."""
        self._optimizer.zero_grad(set_to_none=True)
        loss = self.loss()
        loss.backward()
        if self._update:
            self._optimizer.step()
        return loss.detach()
