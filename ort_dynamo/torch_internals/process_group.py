"""The store of the process group that torch.distributed's initialisation made, which torch has no public name for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import distributed

from ort_dynamo.torch_internals.lookup import private

__all__ = ["GroupStore", "group_store"]

_default_store = private("torch.distributed.distributed_c10d:_get_default_store")


@dataclass(frozen=True)
class GroupStore:
    """The store that the processes of the default group share.

    Attributes:
        store: a torch.distributed.Store.
        rank: this process's.
    """

    store: Any
    rank: int

    def first(self, key: str, value: str) -> str:
        """Set a key if no rank has set it, and give its value; it does not wait for other ranks.

        Raises:
            RuntimeError: the store is closed, or does not support this.
        """
        found: bytes = self.store.compare_set(f"ort_dynamo/{key}", "", value)
        return found.decode()


def group_store() -> GroupStore | None:
    """Return the store of the default group; None outside of one, in a group of one, and where torch does not tell."""
    if _default_store is None or not distributed.is_initialized() or distributed.get_world_size() == 1:
        return None
    return GroupStore(_default_store(), distributed.get_rank())
