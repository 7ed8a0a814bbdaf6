"""The environment variables of torchrun: the rank and the number of processes."""

from __future__ import annotations

import os

__all__ = ["TORCHRUN", "local_rank_of_environment", "torchrun_says"]

TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""The variables that torch.distributed.init_process_group needs."""


def local_rank_of_environment(otherwise: int) -> int:
    """Return the number of this process on its machine."""
    return int(os.environ.get("LOCAL_RANK", otherwise))


def torchrun_says() -> tuple[int, int] | None:
    """(RANK, WORLD_SIZE); None where not all of TORCHRUN is set."""
    if not all(name in os.environ for name in TORCHRUN):
        return None
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
