"""The compiled graphs of this process, opened, by graph key."""

from __future__ import annotations

from operator import attrgetter

from ort_dynamo.cache.memory import MemoryCache
from ort_dynamo.runtime.compiled_graph import CompiledGraph

__all__ = ["CACHE"]

CACHE: MemoryCache[CompiledGraph] = MemoryCache(size=attrgetter("built.nbytes"), keep=attrgetter("built.keyable"))
