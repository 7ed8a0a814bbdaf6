"""Records of compiles, as data: where nodes run, changes by passes, saved tensors, the time of each stage."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ort_dynamo.compilation.cut import PartitionRecord
from ort_dynamo.graph.build import BuildRecord, PassRecord, Source
from ort_dynamo.graph.source_line import Owner
from ort_dynamo.segment.segment import EagerNode

__all__ = ["RECORDS", "CompileRecord", "CompileRecords", "GraphRecord", "IslandRecord"]


@dataclass(frozen=True)
class IslandRecord:
    """One island of one graph.

    Attributes:
        name: its name in errors and saved files.
        source: "memory" if this process has compiled one with the same graph key, whose session is reused; "disk" if a
            process has stored it; "built" if it was built.
        build: the statistics of its build, also if it was built earlier.
        seconds: the time to build and open it, or to find it.
        miss: the reason of the cache miss: "absent", "damaged", "refused", "unreadable" (cache/disk.py), "unkeyed" or
            "off"; empty if it was not built.
    """

    name: str
    source: Source
    build: BuildRecord
    seconds: float
    miss: str = ""

    @property
    def was_cached(self) -> bool:
        """True if the island was not built for this graph."""
        return self.source != "built"


@dataclass(frozen=True)
class GraphRecord:
    """One forward, backward or inference graph, or a whole training step.

    Attributes:
        role: "forward", "backward", "inference" or "training".
        native: overload, as text -> its nodes inside islands.
        by_design: overload, as text -> its nodes that torch runs by design: random ops and collectives.
        chosen: "overload: reason", as text -> its nodes that torch runs by choice, since it is faster.
        eager: the fallback nodes, with reasons and lines.
        islands: the islands, in the order in which they run.
        passes: FX passes on this graph alone, in order.
        seconds: the time of its compile, islands included.
        not_recorded: why it is not recorded in a CUDA graph although the option asks for it; else "".
        modules: the modules that called the operators -> "native", "by_design", "chosen" or "eager" -> nodes.
    """

    role: str
    native: Counter[str]
    by_design: Counter[str]
    chosen: Counter[str]
    eager: tuple[EagerNode, ...]
    islands: tuple[IslandRecord, ...]
    passes: tuple[PassRecord, ...]
    seconds: float
    not_recorded: str = ""
    modules: Mapping[Owner, Counter[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class CompileRecord:
    """One of Dynamo's graphs, compiled.

    Attributes:
        partition: the record of the partitioner; None where there are no gradients.
        graphs: forward and backward in the order in which they were compiled, or one inference graph.
        seconds: the time of the whole, AOTAutograd's trace included.
        compile_id: torch's name for this compile, such as "0/1"; None where torch gives none.
        saved: the JSON file that describes how its saved models connect; None if they are not saved.
    """

    partition: PartitionRecord | None
    graphs: tuple[GraphRecord, ...]
    seconds: float
    compile_id: str | None = None
    saved: Path | None = None


class CompileRecords:
    """The last records of a process, the oldest first; safe to use from several threads.

    Args:
        most: the maximum number of records; then the oldest is dropped.
    """

    def __init__(self, most: int) -> None:
        self._kept: deque[CompileRecord] = deque(maxlen=most)
        self._cleared = 0
        self._since = time.time()
        self.renew_lock()

    def renew_lock(self) -> None:
        """Take a new lock, in a forked child: a thread of the parent may have held the old one."""
        self._lock = threading.Lock()

    def begin(self) -> Callable[[CompileRecord], None]:
        """Begin a compile: the returned function keeps its record, unless all was forgotten in the meantime."""
        cleared = self._cleared

        def keep(record: CompileRecord) -> None:
            with self._lock:
                if self._cleared == cleared:
                    self._kept.append(record)

        return keep

    def clear(self) -> None:
        """Forget all records, and those of the compiles that have begun."""
        with self._lock:
            self._kept.clear()
            self._cleared += 1
            self._since = time.time()

    @property
    def since(self) -> float:
        """Since when records are kept, in seconds since the epoch."""
        return self._since

    def __iter__(self) -> Iterator[CompileRecord]:
        with self._lock:
            return iter(tuple(self._kept))

    def __len__(self) -> int:
        return len(self._kept)


RECORDS = CompileRecords(most=1024)
"""Those of this process since torch._dynamo.reset(): more than programs compile on purpose, and small beside the
compiled graphs."""

if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=RECORDS.renew_lock)
