"""A fixed sample of the operator sweep: of every operator the sample in the middle, float32 or what it takes.

And all that the database holds of arguments which eager refuses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from opinfo_samples import DTYPES, check_sample, operators, quiet, samples_of


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


@pytest.mark.parametrize("name", [name for name, op in operators().items() if op.error_inputs_func is not None])
def test_what_eager_refuses_is_refused(name: str) -> None:
    op = operators()[name]
    with quiet():
        for refused in op.error_inputs("cpu"):
            sample = refused.sample_input
            arguments = (sample.input, *sample.args)
            if not _raises(op.op, arguments, sample.kwargs) or _compiled_raises(
                "ort_train", op.op, arguments, sample.kwargs
            ):
                continue
            traced = _compiled_raises("aot_eager", op.op, arguments, sample.kwargs)
            assert not traced, f"{refused.error_type.__name__}, {refused.error_regex}: not raised"


def _compiled_raises(backend: str, function: Callable[..., Any], arguments: Any, keywords: Any) -> bool:
    torch._dynamo.reset()
    return _raises(torch.compile(function, backend=backend), arguments, keywords)


def _raises(function: Callable[..., Any], arguments: Any, keywords: Any) -> bool:
    try:
        function(*arguments, **keywords)
    except Exception:
        return True
    return False
