"""The doctor's probe: a session of one node, run like any graph."""

from __future__ import annotations

import pytest

from ort_dynamo.runtime.installed import probe_device


def test_the_node_runs_and_is_right(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["trial", "cpu"])
    assert probe_device.main() == 0
    assert capsys.readouterr().out == "\n"


def test_a_wrong_result_is_told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["trial", "cpu"])
    monkeypatch.setattr(probe_device, "open_graph", lambda *_: lambda x: (x,))
    assert probe_device.main() == 1
    assert capsys.readouterr().out == "the negative of [0.0, 1.0, 2.0] came out as [0.0, 1.0, 2.0]\n"


def test_the_probe_prints_torchs_error(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> object:
        raise RuntimeError("CUDA error: invalid device function")

    monkeypatch.setattr("sys.argv", ["trial", "cpu"])
    monkeypatch.setattr(probe_device, "open_graph", refused)
    assert probe_device.main() == 1
    assert capsys.readouterr().out == "RuntimeError: CUDA error: invalid device function\n"
