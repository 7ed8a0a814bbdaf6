"""Margin losses are traced as eager computes them; traces in other threads stay torch's own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher

from ort_dynamo.capture.margin_losses import margin_losses


def by_formulas() -> Tensor:
    """Compute a loss whose shape differs, with the kernels that a trace reaches."""
    with enable_python_dispatcher():
        return F.multi_margin_loss(torch.zeros(3), torch.tensor(1), reduction="none")


def test_another_thread_has_torchs_own_formulas() -> None:
    alone = by_formulas()
    with ThreadPoolExecutor(1) as other, margin_losses():
        assert by_formulas().shape == ()
        assert other.submit(by_formulas).result().shape == alone.shape == (1,)
    assert by_formulas().shape == (1,)


def test_contexts_nest_and_an_error_closes_them() -> None:
    with margin_losses():
        with pytest.raises(ZeroDivisionError), margin_losses():
            raise ZeroDivisionError
        assert by_formulas().shape == ()
    assert by_formulas().shape == (1,)
