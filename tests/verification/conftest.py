"""Fixtures of the tests of verification."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ort_dynamo.cache.open_island import CACHE
from ort_dynamo.lowering import registry
from ort_dynamo.passes import outside


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget the lowerings and passes that a test registers: they change what other tests compile and store."""
    monkeypatch.setattr(registry, "_FROM_OUTSIDE", {})
    monkeypatch.setattr(outside, "_LAST", type(outside._LAST)())
    CACHE.clear()
    yield
    CACHE.clear()
