"""Graphs that torch's own cache stores."""

from __future__ import annotations

import pytest

from ort_dynamo.listeners.stored_code import StoredCode
from ort_dynamo.torch_internals.aot_cache import IslandMissError


def test_a_stored_graph_of_another_release_is_a_miss() -> None:
    code = StoredCode.__new__(StoredCode)
    with pytest.raises(IslandMissError, match="another runtime, machine or release"):
        code.__setstate__({"_entries": None, "_islands": {}})
