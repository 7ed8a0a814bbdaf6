"""Fixtures of the tests of trainers in several processes: ranks, which make the group themselves."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import Ranks, compiled_in


@pytest.fixture(scope="session")
def compiled_graphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of compiled graphs that ranks and tests share."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture
def ranks(tmp_path: Path, compiled_graphs: Path) -> Ranks:
    return Ranks(tmp_path, compiled_in(compiled_graphs), makes_group=False)
