"""Tests of environment variables that are on or off."""

from __future__ import annotations

import pytest

from ort_dynamo.errors import InvalidVariableError
from ort_dynamo.program import progress
from ort_dynamo.program.switches import read_switch


@pytest.mark.parametrize(("value", "wanted"), [("1", True), ("0", False), ("", None), (None, None)])
def test_a_switch_is_on_off_or_not_set(value: str | None, wanted: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("A_SWITCH", raising=False)
    if value is not None:
        monkeypatch.setenv("A_SWITCH", value)
    assert read_switch("A_SWITCH") is wanted


def test_another_value_of_a_switch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(progress.SWITCH, "yes")
    with pytest.raises(InvalidVariableError, match="ORT_DYNAMO_PROGRESS cannot be 'yes': expected 0 or 1"):
        progress.is_shown()
