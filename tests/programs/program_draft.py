"""The draft of a program that its ingredients extend: the values so far, and a source of choices."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor

__all__ = ["INGREDIENTS", "Draft", "Ingredient", "ingredient"]

T = TypeVar("T")


class Draft:
    """The next line of a program.

    Attributes:
        values: name -> the value in a run, of all that a line may read.
        parts: attributes of the module that the line adds: name -> text.
    """

    def __init__(self, choose: random.Random, values: Mapping[str, Tensor], number_of_parts: int) -> None:
        self.choose = choose
        self.values = values
        self.parts: dict[str, str] = {}
        self._number = number_of_parts

    def pick(self, options: Sequence[T]) -> T:
        return self.choose.choice(options)

    def chance(self, probability: float) -> bool:
        return self.choose.random() < probability

    def part(self, text: str) -> str:
        """Add an attribute to the module, and return its text in `forward`."""
        name = f"p{self._number + len(self.parts)}"
        self.parts[name] = text
        return f"self.{name}"

    def recent(self, names: Sequence[str]) -> str:
        """Pick a name, the last ones more likely."""
        if self.chance(0.25):
            return self.pick(names)
        return names[-1 - min(int(self.choose.expovariate(0.7)), len(names) - 1)]

    def other(self, name: str, fits: Callable[[Tensor], bool]) -> str | None:
        """Pick another value; None where none fits."""
        names = [other for other, value in self.values.items() if other != name and fits(value)]
        return self.recent(names) if names else None

    def alike(self, name: str, shape: Iterable[int]) -> str | None:
        wanted = tuple(shape)
        return self.other(name, lambda value: tuple(value.shape) == wanted)


Ingredient = Callable[[Draft, str, Tensor], "str | tuple[str, int] | None"]
"""Takes a value by its name; returns an expression, one of several values with their number, or None for no fit."""

INGREDIENTS: list[tuple[float, frozenset[int], Ingredient]] = []
"""Weight, the ranks of tensors it takes, and the ingredient."""


def ingredient(weight: float, *ranks: int) -> Callable[[Ingredient], Ingredient]:
    def register(function: Ingredient) -> Ingredient:
        INGREDIENTS.append((weight, frozenset(ranks or range(1, 6)), function))
        return function

    return register


def call(function: str, *arguments: Any, **named: Any) -> str:
    given = [str(argument) for argument in arguments] + [f"{key}={value!r}" for key, value in named.items()]
    return f"{function}({', '.join(given)})"
