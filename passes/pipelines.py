"""Options -> the ordered tuples of passes; the only file that knows more than one pass."""

from __future__ import annotations

from typing import Protocol

import onnx_ir as ir
from torch.fx.passes.infra.pass_base import PassBase

from ort_dynamo.options import PassOptions
from ort_dynamo.passes.fx.hoist_random import HoistRandom
from ort_dynamo.target import Target

__all__ = ["fx_passes", "onnx_passes"]


def fx_passes(options: PassOptions) -> tuple[PassBase, ...]:
    """Passes on the joint graph before it is cut, or on an inference graph."""
    del options  # nothing here is optional yet
    return (HoistRandom(),)


def onnx_passes(options: PassOptions, target: Target) -> tuple[ir.passes.InPlacePass, ...]:
    """Passes on each lowered model."""
    return ()
