"""The log of TORCH_LOGS=+ort_dynamo: one line for each island and each series of passes."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
import torch


def lines(caplog: pytest.LogCaptureFixture, begin: str, level: int = logging.DEBUG) -> list[str]:
    torch._dynamo.reset()
    caplog.clear()
    with caplog.at_level(level, "ort_dynamo"):
        x = torch.ones(2, 3, requires_grad=True)
        torch.compile(lambda x: (x.sin() * 2).sum(), backend="ort_train")(x).backward()
    return [one for one in caplog.messages if one.startswith(begin)]


def test_debug_says_where_each_island_comes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ORT_DYNAMO_CACHE", "1")
    monkeypatch.setenv("ORT_DYNAMO_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("ORT_DYNAMO_TRACE_CACHE", "0")  # a stored trace opens its islands without a line each
    first, second = lines(caplog, "island "), lines(caplog, "island ")
    pattern = r"island (forward|backward)-\w+: \d operators, {}, \d+\.\d\d s"
    for found, source in ((first, r"compiled \(cache miss: absent\)"), (second, "read from the cache")):
        assert len(found) == 2
        assert all(re.fullmatch(pattern.format(source), one) for one in found), found


def test_debug_says_which_passes_changed_a_graph(caplog: pytest.LogCaptureFixture) -> None:
    found = [one for one in lines(caplog, "") if "passes changed the" in one]
    assert any(re.match(r"\d+ of \d+ passes changed the FX graph: ", one) for one in found)
    assert any(re.match(r"\d+ of \d+ passes changed the ONNX model: ", one) for one in found)


def test_info_says_less(caplog: pytest.LogCaptureFixture) -> None:
    assert lines(caplog, "island ", logging.INFO) == []
