"""Generated programs in CUDA's forms with fused kernels, which the CPU computes, equal eager."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cuda_forms import cuda_forms

if (_folder := str(Path(__file__).resolve().parent.parent / "programs")) not in sys.path:
    sys.path.append(_folder)

from program_comparison import check
from program_refusals import has_refused_numbers
from program_shrink import shrink
from program_writer import write_case

pytestmark = pytest.mark.default_placement


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run(number: int) -> None:
    """Compare the first program with a convolution from a seed on.

    Attention's results have other strides on CUDA. A CPU's convolutions take no float64. CUDA's forms recompute
    arithmetic, so a write to the data of a saved tensor, which autograd does not see, gives another gradient than in
    eager mode.
    """
    mode = ("training", "inference")[number % 2]
    for seed in itertools.count(20 * number):
        case, known = write_case(seed, mode)
        text = case.text()
        left_out = "attention" in text or "float64" in text or ".data" in case.program.after
        if "nn.Conv2d" in text and not left_out and not has_refused_numbers(text):
            break
    with cuda_forms(fused=True):
        state, found = check(case, known=known)
        if state == "wrong":
            said = "\n".join(str(one) for one in found)
            pytest.fail(f"{mode} {seed}: {said}\n\n{shrink(case, found[0].kind, tries=40).text()}", pytrace=False)


@pytest.mark.parametrize("number", range(16))
def test_a_program_with_convolutions_equals_eager(number: int) -> None:
    run(number)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(16, 200))
def test_many_programs_do(number: int) -> None:
    run(number)
