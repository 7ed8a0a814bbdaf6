"""A fixed sample of the operator sweep: of every operator the sample in the middle, float32 or what it takes."""

from __future__ import annotations

import pytest
from opinfo_samples import DTYPES, check_sample, operators, samples_of


@pytest.mark.parametrize("name", operators())
def test_an_operator_gives_eagers_results(name: str) -> None:
    op = operators()[name]
    found = ((dtype, samples_of(op, dtype, limit=3)) for dtype in DTYPES.values())
    dtype, samples = next(((dtype, samples) for dtype, samples in found if samples), (None, []))
    if dtype is None:
        pytest.skip("not on the CPU")
    verdict = check_sample(op, samples[len(samples) // 2], dtype, dynamic=False, in_place=False)
    if verdict.kind in ("not comparable", "not compiled"):
        pytest.skip(verdict.detail)
    assert verdict.kind in ("same", "more exact", "other ties"), verdict.detail
