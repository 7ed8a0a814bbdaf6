"""A fixed sample of the operator sweep: of every operator the sample in the middle, float32 or what it takes.

And all that the database holds of arguments which eager refuses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from opinfo_samples import DTYPES, check_sample, operators, quiet, samples_of

NOT_ON_THE_CPU = {
    "nn.functional.batch_norm.without_cudnn",
    "torch._scaled_mm",
    "torch._scaled_mm_v2",
    "torch.ops.aten._efficient_attention_forward",
    "torch.ops.aten._flash_attention_forward",
}
"""Operators without a dtype on the CPU."""

NOT_COMPARABLE = {
    "jiterator_2inputs_2outputs": "only for CUDA",
    "jiterator_4inputs_with_extra_args": "only for CUDA",
    "jiterator_binary": "only for CUDA",
    "jiterator_binary_return_by_ref": "only for CUDA",
    "jiterator_unary": "only for CUDA",
    "linalg.eig": "eager refuses the gradient of eigenvectors for a random cotangent",
}
"""Operator -> the reason why eager raises, too, for the sample in the middle."""

NOT_COMPILED = {
    "allclose",
    "argwhere",
    "bincount",
    "combinations",
    "corrcoef",
    "cov",
    "equal",
    "item",
    "linalg.lstsq",
    "linalg.lstsq.grad_oriented",
    "masked_select",
    "nn.functional.ctc_loss",
    "nn.functional.gaussian_nll_loss",
    "nn.functional.linear_cross_entropy.chunked",
    "nn.functional.linear_cross_entropy.chunked_none",
    "nn.functional.one_hot",
    "nonzero",
    "resize_",
    "resize_as_",
    "sparse.mm.reduce",
    "sparse.sampled_addmm",
    "to_sparse",
    "unique",
    "unique_consecutive",
}
"""Operators of which Dynamo makes no graph, for the sample in the middle: sizes or Python values that data decides,
sparse tensors, and operators that it leaves to eager."""

TAKEN_BY_EAGER = {"__rmod__", "__rpow__", "__rsub__", "clamp_max", "clamp_min"}
"""Operators with arguments that eager takes, though the database lists them among those that are refused."""

TAKEN_BY_COMPILED = {"aminmax", "cat", "complex", "multinomial", "take"}
"""Operators with an `out=` that eager alone refuses, of another dtype, over an input or expanded (`cat`, torch 2.15);
aot_eager takes it, too."""


@pytest.mark.parametrize("name", operators())
def test_an_operator_gives_eagers_results(name: str) -> None:
    op = operators()[name]
    found = ((dtype, samples_of(op, dtype, limit=3)) for dtype in DTYPES.values())
    dtype, samples = next(((dtype, samples) for dtype, samples in found if samples), (None, []))
    if dtype is None:
        assert name in NOT_ON_THE_CPU
        pytest.skip("not on the CPU")
    verdict = check_sample(op, samples[len(samples) // 2], dtype, dynamic=False, in_place=False)
    skipped = {"not comparable": NOT_COMPARABLE, "not compiled": NOT_COMPILED}
    if name in skipped.get(verdict.kind, ()):
        pytest.skip(verdict.detail)
    assert verdict.kind in ("same", "more exact", "other ties"), f"{verdict.kind}: {verdict.detail}"


@pytest.mark.parametrize("name", [name for name, op in operators().items() if op.error_inputs_func is not None])
def test_what_eager_refuses_is_refused(name: str) -> None:
    op = operators()[name]
    with quiet():
        for refused in op.error_inputs("cpu"):
            sample = refused.sample_input
            arguments = (sample.input, *sample.args)
            said = f"{refused.error_type.__name__}, {refused.error_regex}"
            theirs = _raised(op.op, arguments, sample.kwargs)
            if theirs is None:
                assert name in TAKEN_BY_EAGER, f"{said}: eager does not raise"
                continue
            ours = _compiled_raised("ort_train", op.op, arguments, sample.kwargs)
            if ours is not None and _is_refusal(ours, theirs):
                continue
            traced = _compiled_raised("aot_eager", op.op, arguments, sample.kwargs)
            if ours is None:
                assert traced is None, f"{said}: not raised"
                assert name in TAKEN_BY_COMPILED, f"{said}: not raised, nor by aot_eager"
            else:
                assert traced is not None, f"{said}: raised, and not by aot_eager: {ours!r}"
                assert type(_cause(ours)) is type(_cause(traced)), f"{said}: {_cause(ours)!r} is no refusal"


def _is_refusal(ours: Exception, theirs: Exception) -> bool:
    """Whether an exception is of eager's class, or caused by one of it."""
    return type(_cause(ours)) is type(theirs) or isinstance(ours, type(theirs))


def _cause(error: BaseException) -> BaseException:
    """Follow an exception to the first of its chain: Dynamo wraps what a tracing or a backend raises."""
    while (before := error.__cause__ or error.__context__) is not None:
        error = before
    return error


def _compiled_raised(backend: str, function: Callable[..., Any], arguments: Any, keywords: Any) -> Exception | None:
    torch._dynamo.reset()
    return _raised(torch.compile(function, backend=backend), arguments, keywords)


def _raised(function: Callable[..., Any], arguments: Any, keywords: Any) -> Exception | None:
    try:
        function(*arguments, **keywords)
    except Exception as error:
        return error
    return None
