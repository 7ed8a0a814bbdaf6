"""The CPU memory that ONNX Runtime's sessions of this process share."""

from __future__ import annotations

from ort_dynamo.runtime.installed.importing import onnxruntime

__all__ = ["ARENA", "SharedArena"]

_SMALLEST = 32 << 20
_LARGEST = 2**31 - 256  # ONNX Runtime reads a 32-bit integer, in units of 256 bytes
_ROOM = 1.5
"""The first region's size over the expected bytes, for holes (docs/internals/decisions/0005-order-of-a-backward.md)."""


class SharedArena:
    """One arena for all sessions: the backward and other graphs reuse memory that the forward frees.

    The arena grows by regions, and adjacent free blocks merge only within a region. So there should be few regions. The
    first one has room for the first training graph, and each further one is twice as large, up to a GiB. An untouched
    part of a region takes no memory except for ONNX Runtime's table of it, 1/32 of its size.
    """

    def __init__(self) -> None:
        self._first_region = _SMALLEST
        self._registered = False

    @property
    def registered(self) -> bool:
        """True if the arena is there; its regions cannot be changed any more then."""
        return self._registered

    def expect(self, nbytes: int) -> None:
        """Announce how many bytes a graph holds at its peak, before any session is open; later it has no effect."""
        self._first_region = min(max(int(nbytes * _ROOM), _SMALLEST), _LARGEST)

    def register(self) -> None:
        """Make the arena, unless it is there; sessions whose setting "session.use_env_allocators" is "1" take it.

        A build without the call has none: each session keeps an arena of its own.
        """
        if self._registered:
            return
        ort = onnxruntime()
        if not (hasattr(ort, "create_and_register_allocator") and hasattr(ort, "OrtArenaCfg")):
            return
        place = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
        next_power_of_two = 0
        regions = {
            "max_mem": 0,  # no limit
            "arena_extend_strategy": next_power_of_two,
            "initial_chunk_size_bytes": self._first_region,
            "initial_growth_chunk_size_bytes": _SMALLEST,
            "max_power_of_two_extend_bytes": 1 << 30,
            "max_dead_bytes_per_chunk": 256,  # give away no more of a free piece than is asked for
        }
        try:
            ort.create_and_register_allocator(place, ort.OrtArenaCfg(regions))
        except RuntimeError as error:
            if "already been registered" not in str(error):
                raise
            # The program has registered one for its own sessions, and it serves as well.
        self._registered = True


ARENA = SharedArena()
"""The process's own."""
