"""Finds names for new values of a model."""

from __future__ import annotations

import onnx_ir as ir

__all__ = ["ValueNames"]


class ValueNames:
    """The names of a model's values, sub-graphs' included: ONNX forbids an inner name that hides an outer one."""

    def __init__(self, model: ir.Model) -> None:
        self._taken: set[str] = set()
        for graph in [model.graph, *model.graph.subgraphs()]:
            values = [*graph.inputs, *graph.initializers.values(), *(value for node in graph for value in node.outputs)]
            self._taken.update(value.name for value in values if value.name)

    def fresh(self, wanted: str) -> str:
        """Take `wanted`, or the first of wanted_2, wanted_3 … that is free."""
        name, count = wanted, 1
        while name in self._taken:
            count += 1
            name = f"{wanted}_{count}"
        self._taken.add(name)
        return name
