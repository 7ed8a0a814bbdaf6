"""The settings of cast propagation, as ONNX Runtime's training API names and counts them."""

from __future__ import annotations

import enum

from ort_dynamo.errors import InvalidOptionError
from ort_dynamo.options.spelling import nearest

__all__ = ["PropagateCastOpsStrategy", "checked_allow", "checked_level", "checked_strategy"]


class PropagateCastOpsStrategy(enum.IntEnum):
    """The way to move casts between float32 and a narrower type; the values are ONNX Runtime's.

    Attributes:
        NONE: only casts that do nothing, repeat one another or cancel are removed.
        INSERT_AND_REDUCE: allowed operators become narrow wherever that leaves no more to cast, even if a value that
            was float32 from end to end is rounded on the way.
        FLOOD_FILL: narrow regions grow from the casts outwards over allowed operators, below level 2 only where
            that rounds nothing that was not rounded before.
    """

    NONE = 0
    INSERT_AND_REDUCE = 1
    FLOOD_FILL = 2

    def __repr__(self) -> str:
        return f"{type(self).__name__}.{self.name}"


def checked_strategy(value: object, name: str = "propagate_cast_ops_strategy") -> PropagateCastOpsStrategy:
    """Return a member, given itself, its name in any case, its integer, or a member of ONNX Runtime's enumeration.

    Args:
        value: the value.
        name: the option or parameter, for the error.

    Raises:
        InvalidOptionError: the value is none of these.
    """
    members = PropagateCastOpsStrategy.__members__
    member = getattr(value, "name", value)
    if isinstance(member, str) and member.upper() in members:
        return members[member.upper()]
    if isinstance(value, int) and not isinstance(value, bool) and value in set(PropagateCastOpsStrategy):
        return PropagateCastOpsStrategy(value)
    expected = "one of " + ", ".join(members) + (nearest(member.upper(), members) if isinstance(member, str) else "")
    raise InvalidOptionError(name=name, value=value, expected=expected)


def checked_level(value: object, name: str = "propagate_cast_ops_level") -> int:
    """Return a level: -1, 0, 1 or 2.

    Args:
        value: the value.
        name: the option or parameter, for the error.

    Raises:
        InvalidOptionError: the value is no level.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value not in (-1, 0, 1, 2):
        raise InvalidOptionError(name=name, value=value, expected="-1, 0, 1 or 2")
    return value


def checked_allow(value: object, name: str = "propagate_cast_ops_allow") -> tuple[str, ...]:
    """Return operator types, sorted and without duplicates.

    Args:
        value: the value.
        name: the option or parameter, for the error.

    Raises:
        InvalidOptionError: the value is not a list, tuple or set of operator types.
    """
    if not isinstance(value, (list, tuple, set, frozenset)) or not all(isinstance(v, str) and v for v in value):
        expected = "a list of ONNX operator types, e.g. ['Add', 'Mul']"
        raise InvalidOptionError(name=name, value=value, expected=expected)
    return tuple(sorted(set(value)))
