"""AOTAutograd's own cache on disk: torch's functions and settings for it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._inductor.output_code import OutputCode

from ort_dynamo.torch_internals.lookup import private

__all__ = [
    "AOT_CACHE",
    "BypassError",
    "CacheMissError",
    "IslandMissError",
    "OutputCode",
    "precompiles",
    "serializable",
    "tagged",
]

_log = logging.getLogger(__name__)
_reader = logging.getLogger("torch._inductor.codecache")  # of the module that unpickles AOTAutograd's results
_config = private("torch._functorch.config")
_dynamo_config = private("torch._dynamo.config")
_compiler = private("torch._functorch._aot_autograd.schemas:SerializableAOTDispatchCompiler")
_CACHE = "torch._functorch._aot_autograd.autograd_cache"
BypassError: type[Exception] = private(f"{_CACHE}:BypassAOTAutogradCache", RuntimeError)
CacheMissError: type[Exception] = private(f"{_CACHE}:FXGraphCacheMiss", RuntimeError)


class IslandMissError(CacheMissError):  # type: ignore[misc, valid-type]
    """An island of a stored graph is not in the cache of compiled graphs: a miss, which torch reports as a fault."""


AOT_CACHE = (
    _compiler is not None
    and hasattr(_config, "bundled_autograd_cache")
    and hasattr(torch.compiler.config, "cache_key_tag")
)
"""True if this torch stores the results of a backend."""


def precompiles() -> bool:
    """Check whether the program has torch store Dynamo's results, too (TORCH_CACHING_PRECOMPILE)."""
    return bool(getattr(_dynamo_config, "caching_precompile", False))


def serializable(compile_graph: Callable[..., Any]) -> Any:
    """Tell AOTAutograd that a compiler's result is an OutputCode, which it may store."""
    return _compiler(OutputCode, compile_graph)


def _is_reported(record: logging.LogRecord) -> bool:
    """Drop torch's warning that a stored graph cannot be read if only an island is missing, as after `cache clear`.

    Torch tries the next result of the same key after an error, and so the error cannot come later.
    """
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, IslandMissError):
        _log.info("ort_train: a graph in torch's cache is compiled again: %s", error)
    return not isinstance(error, IslandMissError)


@contextmanager
def tagged(tag: str) -> Iterator[None]:
    """Make AOTAutograd store whole results while this is open, under keys that contain `tag`."""
    before = torch.compiler.config.cache_key_tag
    _reader.addFilter(_is_reported)
    try:
        with _config.patch(bundled_autograd_cache=True), torch.compiler.config.patch(cache_key_tag=f"{before} {tag}"):  # type: ignore[attr-defined]
            yield
    finally:
        _reader.removeFilter(_is_reported)
