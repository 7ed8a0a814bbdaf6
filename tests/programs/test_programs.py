"""Tests of random programs of fixed seeds against eager; `hunt.py` runs more of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from program_comparison import check
from program_shrink import shrink
from program_writer import write_case

MODES = ("training", "inference", "training", "dynamic")
"""The mode of a seed; the seed itself chooses a setting."""

SAMPLE = 60
"""The seeds of the ordinary run; `hunt.py` and the slow ones are the long run."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("seed", [pytest.param(n, marks=[pytest.mark.slow] if n >= SAMPLE else []) for n in range(200)])
def test_a_module_program_equals_eager(seed: int) -> None:
    mode = MODES[seed % len(MODES)]
    case, known = write_case(seed, mode)
    state, found = check(case, known=known)
    if state == "wrong":
        said = "\n".join(str(one) for one in found)
        pytest.fail(f"{mode} {seed}: {said}\n\n{shrink(case, found[0].kind, tries=40).text()}", pytrace=False)
