"""The rules about dtypes of lowering/kernel_dtypes.py are those of torch's kernels.

Every functional overload that PyTorch's operator database reaches, forward and backward, is called with every dtype and
with mixes of two.
"""

from __future__ import annotations

import logging
import warnings
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernel_calls import Call, calls_of, disagreements
from opinfo_samples import DTYPES, operators, quiet, samples_of

PARTS = 16

TAKEN_MIXES = {
    "_cdist_backward",
    "_embedding_bag",
    "_embedding_bag_backward",
    "_fused_rms_norm",
    "_histogramdd_bin_edges",
    "_pdist_backward",
    "_pdist_forward",
    "_trilinear",
    "addcdiv",
    "clamp",
    "convolution",
    "convolution_backward",
    "dist",
    "equal",
    "gelu_backward",
    "huber_loss",
    "index_reduce",
    "ldexp",
    "linalg_ldl_solve",
    "linalg_pinv",
    "linalg_solve_triangular",
    "lu_unpack",
    "mish_backward",
    "mse_loss_backward",
    "multilabel_margin_loss_backward",
    "native_dropout_backward",
    "nll_loss2d_backward",
    "nll_loss_backward",
    "polar",
    "repeat_interleave",
    "rrelu_with_noise_backward",
    "smooth_l1_loss_backward",
    "soft_margin_loss",
    "soft_margin_loss_backward",
    "threshold_backward",
}
"""Operators that run in torch for a few dtypes or mixes that their kernels take: torch's result is right."""

OTHERWISE = {
    "_scaled_dot_product_flash_attention_for_cpu_backward": "the argument has the dtype of the forward's result",
    "_weight_norm_interface_backward": "the argument has the dtype of the forward's result",
    "native_batch_norm_backward": "the argument has the dtype of the forward's result",
    "native_layer_norm_backward": "the argument has the dtype of the forward's result",
    "_batch_norm_with_update_functional": "statistics of halves, which torch's fake tensors have in float32",
    "_embedding_bag": "offsets of another integer dtype than the indices, of which only torch's gradient knows",
    "_embedding_bag_backward": "indices that are all int64 or all int32, as torch's formula of the gradient makes them",
    "_log_softmax_backward_data": "an argument names the dtype, too",
    "_native_batch_norm_legit_functional": "statistics of halves, which torch's fake tensors have in float32",
    "_native_batch_norm_legit_no_training": "statistics of halves, which torch's fake tensors have in halves",
    "_softmax_backward_data": "an argument names the dtype, too",
    "mish_backward": "autograd casts a gradient to the dtype of its input",
    "mse_loss_backward": "autograd casts a gradient to the dtype of its input",
    "native_batch_norm": "statistics of halves, which torch's fake tensors have in halves",
    "native_group_norm": "statistics of halves, which torch's fake tensors have in halves",
    "native_group_norm_backward": "the argument has the dtype of the forward's result",
    "native_layer_norm": "statistics of halves, which torch's fake tensors have in halves",
    "rrelu_with_noise_backward": "autograd casts a gradient to the dtype of its input",
    "scatter_reduce": "a mean of bools; the other reductions take them",
    "smooth_l1_loss_backward": "autograd casts a gradient to the dtype of its input",
    "soft_margin_loss_backward": "autograd casts a gradient to the dtype of its input",
}
"""Operator -> why a mix gives another dtype when it is traced, or is not made."""


def recorded(part: int) -> dict[str, list[Call]]:
    """Overload -> two of its calls, by the operators of one part of the database."""
    found: dict[str, list[Call]] = {}
    for name, op in operators().items():
        if zlib.crc32(name.encode()) % PARTS != part:
            continue
        for dtype in DTYPES.values():
            if samples := samples_of(op, dtype, limit=3):
                for sample in samples:
                    for call in _called(op.op, sample):
                        found.setdefault(str(call[0]), []).append(call)
                break
    return {name: calls[:2] for name, calls in found.items()}


def _called(function: Callable[..., Any], sample: Any) -> list[Call]:
    torch.manual_seed(0)
    with quiet():
        try:
            return calls_of(lambda: function(sample.input, *sample.args, **sample.kwargs))
        except (RuntimeError, ValueError, TypeError, AssertionError):
            return []  # eager refuses sparse layouts and operators of CUDA


IN_CI = 2
"""Parts that CI compares."""


@pytest.mark.parametrize(
    "part", [*range(IN_CI), *(pytest.param(part, marks=pytest.mark.slow) for part in range(IN_CI, PARTS))]
)
def test_rules_and_kernels_agree(part: int) -> None:
    logging.disable()  # fake tensors log their refusals
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compared = recorded(part)
            found = [
                one
                for calls in compared.values()
                for call in calls
                for one in disagreements(call)
                if not _is_known(call, one)
            ]
    finally:
        logging.disable(logging.NOTSET)
    assert len(compared) > 20
    assert not found, "\n".join(found[:20])


def _is_known(call: Call, said: str) -> bool:
    name = call[0]._schema.name.removeprefix("aten::")
    return name in (TAKEN_MIXES if said.endswith("which takes it") else OTHERWISE)
