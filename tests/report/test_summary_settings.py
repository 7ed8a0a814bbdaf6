"""The summary names the setting that makes Dynamo trace the code that it left to eager."""

from __future__ import annotations

import logging
import re

import pytest
import torch
from torch import nn

import ort_dynamo
from ort_dynamo.report.reasons import in_a_line


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


LOGGER = """logging.Logger method not supported for non-export cases
  Explanation: logging.Logger methods are not supported for non-export cases.
  Hint: Add the logging method to `torch._dynamo.config.ignore_logging_functions`.

  Developer debug context: method: <Logger my.model (WARNING)>.warning, args: [], kwargs: {}
"""


def test_a_logger_has_a_line_that_says_whether_it_matters() -> None:
    line = in_a_line(LOGGER)
    assert line.startswith("a call of a logger (my.model.warning) ends the graph: results stay the same")
    assert "torch._dynamo.config.ignore_logging_functions.add(logging.Logger.warning)" in line


@pytest.mark.parametrize("text", ["Unknown fail_and_restart_analysis", LOGGER])
def test_no_line_has_the_words_of_dynamos_developers(text: str) -> None:
    line = in_a_line(text)
    assert "\n" not in line
    assert "fail_and_restart" not in line
    assert "non-export" not in line
    assert "results stay the same" in line


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_the_layer_is_named(kind: str) -> None:
    text = f"""Attempted to wrap RNN, GRU, or LSTM
  Explanation: Dynamo does not support RNN, GRU, or LSTM.
  Hint: Set torch._dynamo.config.allow_rnn=True to enable experimental support

  Developer debug context: {kind}(3, 4)
"""
    assert in_a_line(text) == (
        f"torch.compile leaves nn.{kind} in eager mode. Set torch._dynamo.config.allow_rnn = True to compile it"
    )


def test_an_ignored_logger_no_longer_breaks_the_graph() -> None:
    log = logging.getLogger("ort_dynamo_tests")

    def function(x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        log.warning("seen")
        return x * 2

    torch.compile(function, backend="ort_train")(torch.ones(2))
    (line,) = (note.reason for note in ort_dynamo.summary().breaks)
    setting = re.search(r"torch\._dynamo\.config\.(\w+)\.add\(logging\.Logger\.warning\)", line)
    assert setting is not None
    torch._dynamo.reset()
    ignored = {*getattr(torch._dynamo.config, setting[1]), logging.Logger.warning}
    with torch._dynamo.config.patch({setting[1]: ignored}):
        torch.compile(function, backend="ort_train")(torch.ones(2))
    assert ort_dynamo.summary().breaks == ()
