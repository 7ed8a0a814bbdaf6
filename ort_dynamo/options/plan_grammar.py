"""Plans of recomputation as text, in the grammar of ONNX Runtime's memory optimizer: "Gelu+Dropout+:1:-1".

plans := plan ("," plan)*
plan := cluster ":" type ":" count
cluster := (operator "+")+         the operators to recompute, in the forward's order
type := 0 | 1 | 2                  PlanType
count := -1 | 0 | 1 | ...          that many occurrences, the earliest of the graph; -1 is all of them
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TypeGuard

from ort_dynamo.errors import InvalidOptionError
from ort_dynamo.options.json_file import read_json

__all__ = ["GRAMMAR", "Plan", "PlanType", "is_plan", "is_plan_file", "read_plan_file", "read_plans"]


class PlanType(IntEnum):
    """The action of a plan on the tensors of its cluster, with ONNX Runtime's values."""

    NONE = 0
    """Nothing: a line that is switched off."""
    RECOMPUTE = 1
    """Recompute them from tensors that are saved anyway."""
    RECOMPUTE_WITH_COMPROMISE = 2
    """Save the narrow tensor of a cast instead (such as bfloat16 for float32), and recompute from it."""


@dataclass(frozen=True)
class Plan:
    """One plan; its str is the text.

    Attributes:
        cluster: operator names, each followed by "+" (`python -m ort_dynamo help save_memory` has the names).
        type: the action of the plan.
        count: the number of occurrences in each graph, the earliest first; -1 means all.
    """

    cluster: str
    type: PlanType = PlanType.RECOMPUTE
    count: int = -1

    def __str__(self) -> str:
        return f"{self.cluster}:{self.type.value}:{self.count}"

    def __repr__(self) -> str:
        return f"Plan({str(self)!r})"


_PLAN = re.compile(r"(?P<cluster>([A-Za-z]\w*\+)+):(?P<type>[012]):(?P<count>-1|\d{1,18})")
GRAMMAR = "'<cluster>:<type>:<count>' with a type of 0, 1 or 2 and a count of -1 or more, e.g. 'Gelu+Dropout+:1:-1'"
_ACCEPTED = "plans as text joined by commas, a list of such texts, or the path of a .json file that holds such a list"


def is_plan(text: str) -> bool:
    """Tell if a text is one plan of the grammar."""
    return _PLAN.fullmatch(text) is not None


def read_plans(given: object) -> tuple[Plan, ...]:
    """Return the plans that the option recompute_plan asks for.

    Args:
        given: text (a text that ends in ".json" is a path), a path, None, or an iterable of texts or Plans.

    Raises:
        InvalidOptionError: wrong type, text outside the grammar, a cluster with one type named twice, or a file that
            cannot be read or does not hold a JSON list of texts.
    """
    if given is None:
        return ()
    texts: Iterable[str]
    if is_plan_file(given):
        texts = read_plan_file(given)
    elif isinstance(given, str):
        texts = [given]
    elif isinstance(given, (list, tuple)):
        texts = [str(item) if isinstance(item, Plan) else item for item in given]
    else:
        raise _refused(given, _ACCEPTED)
    if not all(isinstance(text, str) for text in texts):
        raise _refused(given, _ACCEPTED)
    plans = tuple(_parse(part) for text in texts for part in text.split(",") if part.strip())
    named = [(plan.cluster, plan.type) for plan in plans]
    for plan in plans:
        if named.count((plan.cluster, plan.type)) > 1:
            raise _refused(
                given, f"each cluster once with one type, but {plan.cluster}:{plan.type.value} is there twice"
            )
    return plans


def _parse(text: str) -> Plan:
    match = _PLAN.fullmatch(text.strip())
    if match is None:
        raise _refused(text, GRAMMAR)
    return Plan(match["cluster"], PlanType(int(match["type"])), int(match["count"]))


def is_plan_file(given: object) -> TypeGuard[str | os.PathLike[str]]:
    """Tell if a value of recompute_plan is the path of a file of plans."""
    return isinstance(given, os.PathLike) or (isinstance(given, str) and given.strip().endswith(".json"))


def read_plan_file(given: str | os.PathLike[str]) -> list[str]:
    """Return the texts of a file of plans.

    Raises:
        InvalidOptionError: the file cannot be read, or does not hold a JSON list of texts.
    """
    path = Path(given.strip() if isinstance(given, str) else given)
    try:
        texts = read_json(path)
    except (OSError, ValueError) as error:
        raise _refused(os.fspath(path), f"a JSON file with a list of plans; {error}") from error
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise _refused(os.fspath(path), "a JSON file with a list of plans, each a text, at its top")
    return texts


def _refused(value: object, expected: str) -> InvalidOptionError:
    return InvalidOptionError(name="recompute_plan", value=value, expected=expected)
