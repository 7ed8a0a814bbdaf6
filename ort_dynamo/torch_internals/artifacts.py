"""Add data to `torch.compiler.save_cache_artifacts`, and take it back from `load_cache_artifacts`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ort_dynamo.torch_internals.lookup import private

__all__ = ["record_artifact", "register_artifacts"]

_CACHE = "torch.compiler._cache"
_artifact: Any = private(f"{_CACHE}:CacheArtifact")
_factory = private(f"{_CACHE}:CacheArtifactFactory")
_manager = private(f"{_CACHE}:CacheArtifactManager")


def register_artifacts(kind: str, load: Callable[[str, bytes], None]) -> None:
    """Register a kind of entries with torch's cache artifacts; once per process.

    Args:
        kind: its name among torch's.
        load: called with the key and the bytes of each that a program loads.
    """
    if _factory is None:
        return

    class Artifact(_artifact):  # type: ignore[misc]
        def populate_cache(self) -> None:
            load(self.key, self.content)

        @staticmethod
        def type() -> str:
            return kind

    _factory.register(Artifact)


def record_artifact(kind: str, key: str, content: bytes) -> None:
    """Take an entry along when the program saves its compiled code."""
    if _manager is not None:
        _manager.record_artifact(kind, key, content)
