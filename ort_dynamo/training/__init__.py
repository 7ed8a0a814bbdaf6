"""ORTModule and what goes with it: the interface of onnxruntime.training, on this backend."""

from __future__ import annotations

from ort_dynamo.options.cast_strategy import PropagateCastOpsStrategy
from ort_dynamo.training import optim
from ort_dynamo.training.ortmodule import ORTModule

__all__ = ["ORTModule", "PropagateCastOpsStrategy", "is_ortmodule_available", "optim"]


def is_ortmodule_available() -> bool:
    """Say whether ORTModule can be used: always, as it needs no build of its own."""
    return True
