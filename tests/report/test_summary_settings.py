"""The summary names the setting that changes what Dynamo leaves to eager."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ort_dynamo
from ort_dynamo.report.summary import in_a_line


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrent_layer_in_eager_is_said_with_the_setting_that_traces_it(kind: type[nn.RNNBase]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = kind(3, 4)
            self.out = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.layer(x)[0])

    torch.compile(Model(), backend="ort_train")(torch.randn(2, 2, 3))
    seen = ort_dynamo.summary()
    assert any("torch._dynamo.config.allow_rnn" in str(note) for note in (*seen.skipped, *seen.breaks))


def test_a_line_has_the_reason_and_the_first_setting() -> None:
    text = """Attempted to wrap
  Explanation: Dynamo does not support it.
  Hint: Report an issue.
  Hint: Set torch._dynamo.config.allow_it=True to trace it
  Hint: Set torch._dynamo.config.other=True

  Developer debug context: 1"""
    expected = "Attempted to wrap: Dynamo does not support it. Set torch._dynamo.config.allow_it=True to trace it"
    assert in_a_line(text) == expected


def test_a_line_without_a_setting_is_as_it_was() -> None:
    text = "Title:\n  Explanation: A reason.\n  Hint: Report an issue.\n"
    assert in_a_line(text) == "Title: A reason."
