"""What tests of recomputation ask of joint graphs."""

from __future__ import annotations

import torch
from run_twice import run_twice
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.passes.infra.pass_base import PassBase

from ort_dynamo.passes.fx.analysis.saved_tensors import JointGraph, must_recompute

__all__ = ["forward_text", "kept_bytes", "recomputed", "tagged_by", "weight"]


def weight(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def forward_text(gm: GraphModule) -> list[str]:
    """The forward's computations, with what the passes have decided about each."""
    return [
        f"{node.name} = {node.target}({', '.join(a.name for a in node.all_input_nodes)})"
        + (f"  # {node.meta['recompute'].name}" if "recompute" in node.meta else "")
        for node in JointGraph(gm).forward
    ]


def recomputed(gm: GraphModule) -> list[str]:
    return [node.name for node in JointGraph(gm).forward if must_recompute(node)]


def tagged_by(pass_: PassBase, gm: GraphModule) -> list[str]:
    """What a pass tags; a second run must change nothing."""
    before = recomputed(gm)
    modified = run_twice(pass_, gm)
    tagged = [name for name in recomputed(gm) if name not in before]
    assert modified == bool(tagged)
    return tagged


def kept_bytes(gm: GraphModule) -> int:
    joint = JointGraph(gm)
    return joint.cut(joint.tagged()).nbytes
