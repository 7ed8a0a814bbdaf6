"""The first call of a graph in debug mode compares real results with fake ones."""

from __future__ import annotations

import logging

import pytest
import torch

from ort_dynamo.errors import FakeValueError


@torch.library.custom_op("ort_dynamo_test::wrong", mutates_args=())
def wrong(x: torch.Tensor) -> torch.Tensor:
    return x.t().contiguous()


@wrong.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("ort_dynamo_test::transposed", mutates_args=())
def transposed(x: torch.Tensor) -> torch.Tensor:
    return x.t().contiguous().t()


@transposed.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_another_shape_than_promised_raises_in_the_first_call() -> None:
    compiled = torch.compile(lambda x: wrong(x) * 2, backend="ort_train", mode="debug")
    with pytest.raises(
        FakeValueError, match=r"wrong.*returned torch.float32 \(3, 2\), but its fake implementation promises .*\(2, 3\)"
    ):
        compiled(torch.ones(2, 3))


def test_other_strides_are_said_and_the_result_is_right(caplog: pytest.LogCaptureFixture) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return transposed(x).view(6) * 2

    compiled = torch.compile(program, backend="ort_train", mode="debug")
    x = torch.randn(2, 3)
    with caplog.at_level(logging.WARNING, "ort_dynamo.runtime.observe.checked_run"):
        torch.testing.assert_close(compiled(x), x.reshape(6) * 2)
    assert "returns strides (1, 2), but its fake implementation promises (3, 1)" in caplog.text
    torch.testing.assert_close(compiled(x + 1), (x + 1).reshape(6) * 2)  # as it is compiled


def test_a_net_that_keeps_its_promises_trains_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Flatten())
    compiled = torch.compile(net, backend="ort_train", mode="debug")
    with caplog.at_level(logging.WARNING, "ort_dynamo.runtime.observe.checked_run"):
        compiled(torch.randn(2, 3, 8, 8)).square().sum().backward()
    assert "its fake implementation promises" not in caplog.text
    assert all(one.grad is not None for one in net.parameters())
