"""Finds names that are not taken."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

__all__ = ["UniqueNames", "ValueNames", "utf8"]


def utf8(text: str) -> str:
    """Return a text that UTF-8, ONNX's encoding, can hold: a surrogate by itself becomes its escape."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


class UniqueNames:
    """Gives unique names.

    Args:
        taken: names that are in use.
        first: the first suffix of a wanted name that is in use; the next ones follow.
    """

    def __init__(self, taken: Iterable[str] = (), first: int = 1) -> None:
        self._taken = set(taken)
        self._first = first

    def fresh(self, wanted: str) -> str:
        """Take `wanted`, or the first of wanted_1, wanted_2 … (counted from `first`) that is free, as UTF-8."""
        name = wanted = utf8(wanted)
        number = self._first
        while name in self._taken:
            name = f"{wanted}_{number}"
            number += 1
        self._taken.add(name)
        return name


class ValueNames(UniqueNames):
    """The names of a model's values, sub-graphs' included: ONNX forbids an inner name that hides an outer one.

    Args:
        model: the model.
        nodes: also the names of its nodes.
    """

    def __init__(self, model: ir.Model, *, nodes: bool = False) -> None:
        super().__init__(first=2)
        for graph in [model.graph, *model.graph.subgraphs()]:
            values = [*graph.inputs, *graph.initializers.values(), *(value for node in graph for value in node.outputs)]
            self._taken.update(value.name for value in values if value.name)
            if nodes:
                self._taken.update(node.name for node in graph if node.name)
