"""Spells bytes and seconds."""

from __future__ import annotations

__all__ = ["spelled_bytes", "spelled_seconds"]


def spelled_bytes(nbytes: float) -> str:
    """Spell a number of bytes: "1.50 MiB"."""
    if nbytes < 1024:
        return f"{nbytes:.0f} B"
    for unit in ("KiB", "MiB"):
        nbytes /= 1024
        if nbytes < 1024:
            return f"{nbytes:.4g} {unit}"
    return f"{nbytes / 1024:.4g} GiB"


def spelled_seconds(seconds: float) -> str:
    """Spell a time: "1.50 s", "1.50 ms" or "2 µs"."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.2f} ms"
    return f"{seconds * 1e6:.0f} µs"
