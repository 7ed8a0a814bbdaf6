"""What runs in eager is said once, and again for what is compiled after a reset."""

from __future__ import annotations

import logging

import pytest
import torch


@torch.library.custom_op("ort_dynamo_tests::halve", mutates_args=())
def halve(x: torch.Tensor) -> torch.Tensor:
    return x / 2


@halve.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_a_reset_lets_warnings_come_again(caplog: pytest.LogCaptureFixture) -> None:
    said = []
    with caplog.at_level(logging.WARNING, logger="ort_dynamo"):
        for _ in range(2):
            torch._dynamo.reset()
            for shape in ((3,), (3, 2)):
                torch.compile(lambda x: halve(x) + 1, backend="ort_train", dynamic=False)(torch.ones(shape))
            said.append(sum("ort_dynamo_tests.halve" in record.getMessage() for record in caplog.records))
    assert said == [1, 2]
