"""Every test starts with nothing compiled and nothing counted."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from torch._dynamo.utils import counters

if "PYTEST_XDIST_WORKER" in os.environ:
    # The workers share the cores; threads that spin in each of them would wait for one another.
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()
