"""Fixtures of the tests of torch.distributed: ranks, with a cache folder of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import Ranks, compiled_in


@pytest.fixture(scope="session")
def compiled_graphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a cache folder to tests that do not check builds: they read graphs that other tests have built."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture
def ranks(tmp_path: Path, compiled_graphs: Path) -> Ranks:
    return Ranks(tmp_path, compiled_in(compiled_graphs))
