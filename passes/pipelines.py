"""Options -> the ordered tuples of passes; the only file that knows more than one pass."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import (
    CommonSubexpressionEliminationPass,
    IdentityEliminationPass,
    RemoveUnusedNodesPass,
    RemoveUnusedOpsetsPass,
)
from torch.fx.passes.infra.pass_base import PassBase

from ort_dynamo.options import PassOptions
from ort_dynamo.passes.fx.hoist_random import HoistRandom
from ort_dynamo.passes.onnx.fuse_row_sum import FuseRowSum
from ort_dynamo.target import Target

__all__ = ["fx_passes", "onnx_passes"]


def fx_passes(options: PassOptions) -> tuple[PassBase, ...]:
    """Passes on the joint graph before it is cut, or on an inference graph."""
    del options  # what runs here is needed for correctness
    return (HoistRandom(),)


def onnx_passes(options: PassOptions, target: Target) -> tuple[ir.passes.InPlacePass, ...]:
    """Passes on each lowered model, in order."""
    clean_up: tuple[ir.passes.InPlacePass, ...] = (
        IdentityEliminationPass(),
        CommonSubexpressionEliminationPass(),
        RemoveUnusedNodesPass(),
        RemoveUnusedOpsetsPass(),
    )
    # Fusions come after common sub-expressions are one, and leave nothing unused themselves.
    fusions = (FuseRowSum(),) if options.fuse and target.device_type == "cpu" else ()
    return clean_up + fusions
