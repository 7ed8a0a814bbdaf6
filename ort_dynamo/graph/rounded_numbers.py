"""Python's numbers with the values of a dtype's: floats have fewer digits there than Python's, and integers wrap.

Dynamo traces these functions. A number that it keeps open, such as a symbolic size, is never rounded, as that would
install guards.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from ort_dynamo.torch_internals.sizes.symbols import has_static_value

__all__ = ["ceil", "divide", "floor", "is_nan", "power_of", "round_to", "truncate"]


class _Format(NamedTuple):
    """A binary format of floats.

    Attributes:
        digits: the bits of a significand.
        least: the exponent of the smallest normal number.
        bound: the smallest number that is rounded to infinity.
    """

    digits: int
    least: int
    bound: float


_FORMATS = {
    torch.float32: _Format(24, -126, (2 - 2.0**-24) * 2.0**127),
    torch.float16: _Format(11, -14, (2 - 2.0**-11) * 2.0**15),
    torch.bfloat16: _Format(8, -126, (2 - 2.0**-8) * 2.0**127),
}
"""The formats with fewer digits than Python's floats."""

_RANGES = {
    dtype: (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    for dtype in (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
}


def round_to(number: Any, dtype: torch.dtype) -> Any:
    """Return the number of `dtype` that an operator of that dtype gives for an exact result.

    Args:
        number: a Python number or an open one, which comes back as it is.
        dtype: a dtype of bools, integers or floats. A whole number that fits in a dtype of floats stays an int.
    """
    if not has_static_value(number):
        return number
    if dtype == torch.bool:
        return bool(number)
    if dtype.is_floating_point:
        rounded = _round_float(float(number), dtype)
        return number if number == rounded else rounded
    least, most = _RANGES[dtype]
    whole = int(number)
    return whole if least <= whole <= most else (whole - least) % (most - least + 1) + least


def _round_float(number: float, dtype: torch.dtype) -> float:
    if dtype not in _FORMATS or not math.isfinite(number):
        return number
    form = _FORMATS[dtype]
    if abs(number) >= form.bound:
        return math.copysign(math.inf, number)
    if abs(number) < 2.0**form.least:  # has the last place of the smallest normal number
        shift = 1.5 * 2.0 ** (form.least - form.digits + 53)
        return math.copysign(number + shift - shift, number)
    spread = number * (2.0 ** (53 - form.digits) + 1)  # Veltkamp's splitting: exact, to the nearest, ties to even
    return spread - (spread - number)


def floor(number: Any, dtype: torch.dtype) -> Any:
    """Return the largest whole number that is not greater than a number of `dtype`.

    An open number that was not rounded is taken for a whole one if it lies a rounding error below it.
    """
    if isinstance(number, int):
        return number
    if not has_static_value(number):
        return math.floor(number + abs(number) * _rounding_error(dtype))
    return math.floor(number) if math.isfinite(number) else number


def ceil(number: Any, dtype: torch.dtype) -> Any:
    """Return the smallest whole number that is not less than a number of `dtype`; an open one as for `floor`."""
    if isinstance(number, int):
        return number
    if not has_static_value(number):
        return math.ceil(number - abs(number) * _rounding_error(dtype))
    return math.ceil(number) if math.isfinite(number) else number


def truncate(number: Any, dtype: torch.dtype) -> int:
    """Round a number of `dtype` towards zero; an open one as for `floor`."""
    if isinstance(number, int):
        return int(number)
    if not has_static_value(number):
        return math.trunc(number + number * _rounding_error(dtype))
    return math.trunc(number)


def _rounding_error(dtype: torch.dtype) -> float:
    return 2.0 ** -_FORMATS[dtype].digits if dtype in _FORMATS else 0.0


def divide(a: Any, b: Any) -> Any:
    """Divide floats as IEEE 754 does, by zero too."""
    if not has_static_value(b) or b != 0:
        return a / b
    if not has_static_value(a) or a == 0 or is_nan(a):
        return math.nan
    return math.copysign(math.inf, a) * math.copysign(1.0, b)


def power_of(a: Any, b: Any) -> Any:
    """Raise a float to a power as IEEE 754 does, where Python's is complex or an error too."""
    if not has_static_value(a) or not has_static_value(b):
        return a**b
    if a == 0 and b < 0:
        return math.copysign(math.inf, a) if b % 2 == 1 else math.inf
    if math.isfinite(a) and a < 0 and b % 1 != 0 and math.isfinite(b):
        return math.nan
    try:
        return math.pow(a, b)
    except OverflowError:
        return -math.inf if a < 0 and b % 2 == 1 else math.inf


def is_nan(number: Any) -> bool:
    """Check whether a number is NaN; an open one is not."""
    return isinstance(number, float) and has_static_value(number) and math.isnan(number)
