"""ORTModule's levels of logging, and its logger."""

from __future__ import annotations

import logging
from enum import IntEnum

import torch

__all__ = ["LogLevel", "configure_logger", "rank_and_world_size"]


class LogLevel(IntEnum):
    """The levels of ORTModule's log."""

    VERBOSE = 0
    DEVINFO = 1
    INFO = 2
    WARNING = 3
    ERROR = 4
    FATAL = 5


_PYTHON_LEVELS = {
    LogLevel.VERBOSE: logging.DEBUG,
    LogLevel.DEVINFO: logging.INFO,
    LogLevel.INFO: logging.INFO,
    LogLevel.WARNING: logging.WARNING,
    LogLevel.ERROR: logging.ERROR,
    LogLevel.FATAL: logging.FATAL,
}


def rank_and_world_size() -> tuple[int, int]:
    """Return this process's rank and the number of processes; (0, 1) outside of torch.distributed."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


def configure_logger(level: LogLevel) -> logging.Logger:
    """Give ORTModule's logger, "orttraining", set to `level`.

    Among several processes its name ends in the rank, and from INFO up only rank 0 speaks.
    """
    rank, world_size = rank_and_world_size()
    logger = logging.getLogger("orttraining" + (f".rank-{rank}" if world_size > 1 else ""))
    logger.disabled = level >= LogLevel.INFO and rank != 0
    logger.setLevel(_PYTHON_LEVELS[level])
    return logger
