"""The samples of an operator of PyTorch's database as cases for a worker's process."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch._dynamo
from opinfo_samples import DTYPES, check_sample, operators, samples_of
from torch.testing._internal.opinfo.core import SampleInput
from workers import Case

__all__ = ["Job", "cases_of", "prepare"]


@dataclass(frozen=True)
class Job:
    """One operator and dtype."""

    operator: str
    dtype: str
    samples: int | None
    dynamic: bool
    in_place: bool
    seed: int = 0
    capture: bool = False
    device: str = "cpu"


def prepare(threads: int = 1) -> None:
    """Set up a worker."""
    torch.set_num_threads(threads)
    logging.disable(logging.WARNING)  # each node that stays in eager; the counters say it


def cases_of(job: Job) -> Iterator[Case]:
    """The samples of a job."""
    op, dtype = operators()[job.operator], DTYPES[job.dtype]
    torch._dynamo.config.capture_dynamic_output_shape_ops = job.capture
    torch._dynamo.config.capture_scalar_outputs = job.capture

    def check(sample: SampleInput) -> dict[str, Any]:
        return asdict(check_sample(op, sample, dtype, dynamic=job.dynamic, in_place=job.in_place))

    for sample in samples_of(op, dtype, job.samples, job.seed, job.device):
        yield partial(check, sample)
