"""Write to the log of compiles that torch keeps where TORCH_TRACE names a folder, and that tlparse shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ort_dynamo.torch_internals.lookup import private

__all__ = ["write_artifact"]

_trace_structured: Callable[..., Any] = private("torch._logging:trace_structured", lambda *_, **given: None)


def write_artifact(name: str, text: Callable[[], str]) -> None:
    """Write a text beside the compile that torch is at; without torch's function, or without TORCH_TRACE, nothing.

    Args:
        name: the artifact's name, which becomes a file's.
        text: gives the text; called only where torch keeps a log.
    """
    _trace_structured(
        "artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=text, expect_trace_id=False
    )
