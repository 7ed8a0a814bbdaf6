"""Passes are to find nothing left to do in what they have made."""

from __future__ import annotations

from torch.fx import GraphModule
from torch.fx.passes.infra.pass_base import PassBase

__all__ = ["run_twice"]


def run_twice(pass_: PassBase, gm: GraphModule) -> bool:
    """Run a pass, and again, which must change nothing; whether the first run said that it changed something."""
    result = pass_(gm)
    assert result is not None
    again = pass_(gm)
    assert again is not None
    assert not again.modified
    return result.modified
