"""Fixtures of the tests of torch.distributed: ranks, with a cache folder of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import Ranks, compiled_in


@pytest.fixture(scope="session")
def compiled_graphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of compiled graphs for the tests that do not ask what is built: they read what others have built."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture
def ranks(tmp_path: Path, compiled_graphs: Path) -> Ranks:
    return Ranks(tmp_path, compiled_in(compiled_graphs))
