"""Tests of the variables and the option that say where the cache is and how large it gets."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from ort_dynamo.cache.disk import disk_cache
from ort_dynamo.errors import InvalidOptionError, InvalidVariableError
from ort_dynamo.options.cache_location import DEFAULT_BYTES, cache_location
from ort_dynamo.options.groups import CacheOptions, parse_options


def test_the_default_is_the_platforms_folder_for_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("ORT_DYNAMO_CACHE", raising=False)
    monkeypatch.delenv("ORT_DYNAMO_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = cache_location()
    assert found is not None
    assert found.max_bytes == DEFAULT_BYTES
    if sys.platform == "linux":
        assert found.path == tmp_path / "ort_dynamo"


@pytest.mark.parametrize(
    ("text", "nbytes"), [("500MB", 500_000_000), ("2GiB", 2**31), ("1.5 kb", 1500), ("7", 7), ("", DEFAULT_BYTES)]
)
def test_a_size_has_a_unit(monkeypatch: pytest.MonkeyPatch, text: str, nbytes: int) -> None:
    monkeypatch.setenv("ORT_DYNAMO_CACHE_SIZE", text)
    found = cache_location(True)
    assert found is not None
    assert found.max_bytes == nbytes


@pytest.mark.parametrize(
    ("name", "value"),
    [("ORT_DYNAMO_CACHE_SIZE", "much"), ("ORT_DYNAMO_CACHE_SIZE", "9" * 400), ("ORT_DYNAMO_CACHE", "no")],
)
def test_a_variable_with_another_value_is_an_error(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.delenv("ORT_DYNAMO_CACHE", raising=False)
    monkeypatch.setenv(name, value)
    with pytest.raises(InvalidVariableError, match=f"{name} cannot be '{value}'"):
        cache_location()


@pytest.mark.parametrize("options", [{"cache": 1}, {"cache": ""}, {"cache": 3}], ids=str)
def test_an_option_with_another_value_is_an_error(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOptionError):
        parse_options(None, options)


@pytest.mark.skipif(sys.platform == "win32", reason="the home directory is found otherwise there")
@pytest.mark.parametrize("folder", [None, "~nobody_of_this_name/cache"])
def test_without_a_home_directory_nothing_is_stored_and_nothing_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, folder: str | None
) -> None:
    pwd = pytest.importorskip("pwd")

    def no_entry(*_: object) -> None:
        raise KeyError("getpwuid(): uid not found: 12345")

    monkeypatch.setattr(pwd, "getpwuid", no_entry)
    for name in ("HOME", "ORT_DYNAMO_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("ort_dynamo.cache.disk._said", {})
    assert disk_cache(CacheOptions(disk_cache=True, cache_dir=folder)) is None
    assert "set ORT_DYNAMO_CACHE_DIR to an absolute path" in caplog.text
    with pytest.raises(InvalidVariableError, match="There is no home directory for the cache in '~"):
        cache_location(True, folder)
