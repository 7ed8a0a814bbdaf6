"""A fixed sample of the operator sweep: of every operator the middle sample, in float32 or a dtype that it takes.

All of the database's arguments that eager rejects are tried, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from opinfo_samples import DTYPES, check_sample, operators, quiet, samples_of
from torch._dynamo.exc import TorchDynamoException, TorchRuntimeError

from ort_dynamo.errors import OrtDynamoError

IS_OLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15)
"""True if torch is older than the newest tested one, in which some operators changed."""

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
    *(["combinations"] if IS_OLD else []),
}
"""Operators of which Dynamo makes no graph, for the sample in the middle: sizes or Python values that data decides,
sparse tensors, and operators that it leaves to eager."""

SKIPPED = {
    "not on the CPU": NOT_ON_THE_CPU,
    "not comparable": set(NOT_COMPARABLE),
    "not compiled": NOT_COMPILED,
}
"""Verdict -> the operators that have it; no other operator may, and each of these has to."""

TAKEN_BY_EAGER = {"__rmod__", "__rpow__", "__rsub__", "clamp_max", "clamp_min"}
"""Operators with arguments that eager takes, though the database lists them among those that are refused."""

TAKEN_BY_COMPILED = {"aminmax", "cat", "complex", "multinomial", "take"}
"""Operators with an `out=` that eager alone refuses, of another dtype, over an input or expanded (`cat`, torch 2.15);
aot_eager takes it, too."""


REFUSED_OTHERWISE: dict[str, tuple[set[str], str]] = {
    "amax": (
        {"RuntimeError"},
        "fake tensors say that no element is there before the kernel, which raises an IndexError",
    ),
    "amin": ({"RuntimeError"}, "as amax"),
    "aminmax": ({"RuntimeError"}, "as amax"),
    "cat": (
        {"IndexError", *(["BackendCompilerFailed"] if IS_OLD else [])},
        "torch's decomposition looks at the dimension first, and before 2.15 its fake tensors at an expanded `out`",
    ),
    "complex": ({"AssertionError"}, "torch's decomposition fails an assertion for arguments that the kernel refuses"),
    "gather": ({"IndexOutOfBoundsError"}, "a session finds the index; the class is a RuntimeError and an IndexError"),
    "multinomial": (
        {"BackendCompilerFailed"},
        "our decomposition refuses the count in eager's words while it compiles",
    ),
    "narrow_copy": ({"IndexError"}, "torch's decomposition looks at the dimension first"),
    "nn.functional.embedding": (
        {"AssertionError"},
        "torch's decomposition fails an assertion for arguments that the kernel refuses",
    ),
    "scatter": ({"IndexOutOfBoundsError"}, "as gather"),
    "scatter_add": ({"IndexOutOfBoundsError"}, "as gather"),
}
"""Operator -> the classes with which it is refused where eager's is another one, and why."""

if not IS_OLD:
    REFUSED_OTHERWISE["mean"] = (
        {"RuntimeError"},
        "fake tensors refuse the dtype, with the class above the kernel's NotImplementedError",
    )


@pytest.mark.parametrize("name", operators())
def test_an_operator_gives_eagers_results(name: str) -> None:
    op = operators()[name]
    found = ((dtype, samples_of(op, dtype, limit=3)) for dtype in DTYPES.values())
    dtype, samples = next(((dtype, samples) for dtype, samples in found if samples), (None, []))
    if dtype is None:
        assert name in SKIPPED["not on the CPU"], "the operator has no sample"
        pytest.skip("not on the CPU")
    verdict = check_sample(op, samples[len(samples) // 2], dtype, dynamic=False, in_place=False)
    listed = [kind for kind, names in SKIPPED.items() if name in names]
    if listed:
        assert [verdict.kind] == listed, f"{name} is listed as {listed}, and is {verdict.kind}: {verdict.detail}"
        pytest.skip(verdict.detail)
    assert verdict.kind in ("same", "more exact", "other ties"), f"{verdict.kind}: {verdict.detail}"


def test_every_operator_that_is_listed_exists() -> None:
    assert {*NOT_ON_THE_CPU, *NOT_COMPARABLE, *NOT_COMPILED, *REFUSED_OTHERWISE} <= operators().keys()


@pytest.mark.parametrize("name", [name for name, op in operators().items() if op.error_inputs_func is not None])
def test_inputs_that_eager_rejects_are_rejected(name: str) -> None:
    op = operators()[name]
    otherwise, _ = REFUSED_OTHERWISE.get(name, (set(), ""))
    found: set[str] = set()
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
            if ours is None:
                assert name in TAKEN_BY_COMPILED, f"{said}: not raised"
                assert _compiled_raised("aot_eager", op.op, arguments, sample.kwargs) is None, f"{said}: not raised"
            elif not _is_refusal(ours, theirs):
                refusal = _refusal(ours)
                assert type(refusal).__name__ in otherwise, f"{said}: {ours!r} is no refusal, by {refusal!r}"
                found.add(type(refusal).__name__)
    assert found == otherwise, f"{name} is listed with a class that nothing raises"


def _is_refusal(ours: Exception, theirs: Exception) -> bool:
    """Check for an exception of eager's class, or of a subclass that is not Dynamo's or this project's."""
    refusal = _refusal(ours)
    foreign = (TorchDynamoException, OrtDynamoError)
    return type(refusal) is type(theirs) or (isinstance(refusal, type(theirs)) and not isinstance(refusal, foreign))


def _refusal(error: BaseException) -> BaseException:
    """Give the exception that an operator raised on fake tensors, if Dynamo wrapped one; else itself.

    Other errors of Dynamo, about itself or a failing backend, are no refusals, whatever their cause.
    """
    return _cause(error) if isinstance(error, TorchRuntimeError) else error


def _cause(error: BaseException) -> BaseException:
    """Follow an exception to the first of its chain."""
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
