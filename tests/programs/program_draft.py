"""The draft of a program that its ingredients extend: the values so far, and a source of choices."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

__all__ = ["INGREDIENTS", "Draft", "Ingredient", "Row", "call", "ingredient"]

T = TypeVar("T")

_TIED = ("nn.Linear", "nn.Conv", "nn.Embedding")
"""The layers that may share a weight."""


class Draft:
    """The next line of a program.

    Attributes:
        values: name -> the value in a run, of all that a line may read.
        parts: attributes of the module that the line adds: name -> text.
    """

    def __init__(self, choose: random.Random, values: Mapping[str, Tensor], parts: Mapping[str, str]) -> None:
        self.choose = choose
        self.values = values
        self.parts: dict[str, str] = {}
        self._before = parts

    def pick(self, options: Sequence[T]) -> T:
        return self.choose.choice(options)

    def weighted(self, rows: Sequence[Row]) -> Row:
        return self.choose.choices(rows, [row.weight for row in rows])[0]

    def chance(self, probability: float) -> bool:
        return self.choose.random() < probability

    def part(self, text: str) -> str:
        """Add an attribute to the module, and return its text in `forward`.

        An equal layer may be used again, or share its weight; and parameters may be frozen.
        """
        equal = [name for name, other in self._before.items() if other == text]
        if equal and self.chance(0.5):
            shared = f"self.{self.pick(equal)}"
            if not text.startswith(_TIED) or self.chance(0.5):
                return shared
            text = f"tied({text}, {shared})"
        elif text.startswith("nn.") and "nn.Buffer" not in text and self.chance(0.07):
            text += ".requires_grad_(False)"
        name = f"p{len(self._before) + len(self.parts)}"
        self.parts[name] = text
        return f"self.{name}"

    def recent(self, names: Sequence[str]) -> str:
        """Pick a name, the last ones more likely."""
        if self.chance(0.25):
            return self.pick(names)
        return names[-1 - min(int(self.choose.expovariate(0.7)), len(names) - 1)]

    def other(self, name: str, fits: Callable[[Tensor], bool]) -> str | None:
        """Pick another floating-point value; None where none fits."""
        floats = ((other, value) for other, value in self.values.items() if value.is_floating_point())
        names = [other for other, value in floats if other != name and fits(value)]
        return self.recent(names) if names else None

    def alike(self, name: str, shape: Iterable[int]) -> str | None:
        wanted = tuple(shape)
        return self.other(name, lambda value: tuple(value.shape) == wanted)


Ingredient = Callable[[Draft, str, Tensor], "str | tuple[str, int] | None"]
"""Takes a value by its name; returns an expression, one of several values with their number, or None for no fit."""


@dataclass(frozen=True)
class Row:
    """An ingredient, its weight, and the tensors that it takes: of these ranks, of integers or of floats."""

    weight: float
    ranks: frozenset[int]
    integers: bool
    write: Ingredient

    def takes(self, value: Tensor) -> bool:
        return value.dim() in self.ranks and value.is_floating_point() != self.integers


INGREDIENTS: list[Row] = []


def ingredient(weight: float, *ranks: int, integers: bool = False) -> Callable[[Ingredient], Ingredient]:
    def register(function: Ingredient) -> Ingredient:
        INGREDIENTS.append(Row(weight, frozenset(ranks or range(1, 6)), integers, function))
        return function

    return register


def call(function: str, *arguments: Any, **named: Any) -> str:
    given = [str(argument) for argument in arguments] + [f"{key}={value!r}" for key, value in named.items()]
    return f"{function}({', '.join(given)})"
