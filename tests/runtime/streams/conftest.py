"""A fixture: CUDA whose streams only record the calls made to them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fake_streams import FakeCuda, fake_cuda

from ort_dynamo.runtime import streams


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    streams._stream_apart.cache_clear()
    with fake_cuda(monkeypatch) as fake:
        yield fake
