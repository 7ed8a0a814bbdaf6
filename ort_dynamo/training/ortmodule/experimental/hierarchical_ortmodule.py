"""HierarchicalORTModule, which ORTModule itself has become."""

from __future__ import annotations

from ort_dynamo.training.ortmodule.wrapper import ORTModule

__all__ = ["HierarchicalORTModule"]


class HierarchicalORTModule(ORTModule):
    """An ORTModule: code that cannot be captured splits the graph where it stands, so no module has to be left out."""
