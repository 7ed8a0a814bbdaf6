"""Helpers of tests of recomputation: tags, recomputed nodes and saved bytes of joint graphs."""

from __future__ import annotations

import re

import torch
from run_twice import run_twice
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.passes.infra.pass_base import PassBase
from torch.utils.checkpoint import CheckpointPolicy

from ort_dynamo.fx_testing import graph_text, unwrapped
from ort_dynamo.passes.fx.analysis.saved_tensors import JointGraph, must_recompute

__all__ = ["assert_tags", "recomputed", "saved_bytes", "weight"]


def weight(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def assert_tags(pass_: PassBase, gm: GraphModule, after: str) -> None:
    """Check the pass's tag on each of the forward's nodes, and that it changes nothing else.

    Args:
        pass_: the pass.
        gm: a joint graph.
        after: the text of the forward after the pass.
    """
    before = graph_text(gm)
    modified = run_twice(pass_, gm)
    found, wanted = unwrapped(graph_text(gm, JointGraph(gm).forward)), unwrapped(after)
    assert found == wanted, f"the pass made\n{found}\nnot\n{wanted}"
    assert modified == (graph_text(gm) != before), "`modified` is wrong"
    assert _untagged(graph_text(gm)) == _untagged(before), "the pass changes more than tags"


def _untagged(text: str) -> list[list[str]]:
    """Give each line's call and its comment, without tags."""
    lines = (re.split(r"  # | \| ", line) for line in unwrapped(text).splitlines())
    return [[one for one in line if one not in CheckpointPolicy.__members__] for line in lines]


def recomputed(gm: GraphModule) -> list[str]:
    return [node.name for node in JointGraph(gm).forward if must_recompute(node)]


def saved_bytes(gm: GraphModule) -> int:
    joint = JointGraph(gm)
    return joint.cut(joint.tagged()).nbytes
