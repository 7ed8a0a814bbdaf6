"""A pass changes nothing when it runs a second time."""

from __future__ import annotations

from torch.fx import GraphModule
from torch.fx.passes.infra.pass_base import PassBase

from ort_dynamo.passes.running import run_passes

__all__ = ["run_twice"]


def run_twice(pass_: PassBase, gm: GraphModule) -> bool:
    """Run a pass, and again, which must change nothing. Fake values, outputs and memory are checked after each."""
    first, again = run_passes([pass_, pass_], gm, check=True)
    assert not again.modified
    return first.modified
