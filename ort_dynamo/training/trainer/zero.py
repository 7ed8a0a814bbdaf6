"""ZeRO's first stage by torch's ZeroRedundancyOptimizer: each process updates some weights, and gives them to all.

It divides whole weights, so that the norms of gradients, and LAMB's of each weight, need nothing from other processes.
FSDP2 splits each weight and its gradient: ZeRO's later stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer

__all__ = ["ZeroUpdate"]

_Apply = Callable[[], None]


class ZeroUpdate:
    """Divides the updates of parameters among processes.

    Args:
        parameters: those that are trained, in the same order in all processes.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._zero = ZeroRedundancyOptimizer(parameters, _OwnUpdate)
        self.own = {id(one) for group in self._zero.optim.param_groups for one in group["params"]}

    def step(self, apply: _Apply = lambda: None) -> None:
        """Call what updates this process's own parameters; then all processes get all of them."""
        self._zero.step(apply=apply)


class _OwnUpdate(Optimizer):
    """What ZeroRedundancyOptimizer steps, of the parameters that are its process's own."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {})

    def step(self, closure: Callable[[], Tensor] | None = None, *, apply: _Apply = lambda: None) -> None:  # type: ignore[override]
        apply()
