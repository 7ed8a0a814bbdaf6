"""The functions that torch adds to sympy for sizes, and its interpreter of expressions of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import sympy

# Every tested version has them here; expressions over sizes are evaluated by them.
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from ort_dynamo.torch_internals.lookup import private

__all__ = [
    "FUNCTIONS_OF_SIZES",
    "ROUNDED",
    "CeilToInt",
    "CleanDiv",
    "FloatPow",
    "FloatTrueDiv",
    "FloorDiv",
    "FloorToInt",
    "IntTrueDiv",
    "Max",
    "Min",
    "Mod",
    "ModularIndexing",
    "OpaqueUnaryFn_sqrt",
    "PythonMod",
    "PythonReferenceAnalysis",
    "RoundToInt",
    "ToFloat",
    "TruncToInt",
    "sympy_interp",
]

if TYPE_CHECKING:
    from torch.utils._sympy.functions import (
        CeilToInt,
        CleanDiv,
        FloatPow,
        FloatTrueDiv,
        FloorDiv,
        FloorToInt,
        IntTrueDiv,
        Max,
        Min,
        Mod,
        ModularIndexing,
        OpaqueUnaryFn_sqrt,
        PythonMod,
        RoundToInt,
        ToFloat,
        TruncToInt,
    )
else:

    def _function(name: str) -> Any:
        """torch's function, or a class without instances: where torch lacks a function no expression calls it."""
        return private(f"torch.utils._sympy.functions:{name}") or type(name, (sympy.Function,), {})

    CeilToInt = _function("CeilToInt")
    CleanDiv = _function("CleanDiv")
    FloatPow = _function("FloatPow")
    FloatTrueDiv = _function("FloatTrueDiv")
    FloorDiv = _function("FloorDiv")
    FloorToInt = _function("FloorToInt")
    IntTrueDiv = _function("IntTrueDiv")
    Max = _function("Max")
    Min = _function("Min")
    Mod = _function("Mod")
    ModularIndexing = _function("ModularIndexing")
    OpaqueUnaryFn_sqrt = _function("OpaqueUnaryFn_sqrt")
    PythonMod = _function("PythonMod")
    RoundToInt = _function("RoundToInt")
    ToFloat = _function("ToFloat")
    TruncToInt = _function("TruncToInt")

ROUNDED: tuple[Any, ...] = (CeilToInt, FloorToInt, RoundToInt, TruncToInt)
"""Functions that round a float, which sympy computes in another order.

It makes `int(n * 7.0)` of `int(n * 0.7 * 10)`, which is 21 in place of 20 for n = 3. So where a node of the graph has
such a size, nothing computes it again.
"""

_TRIGONOMETRIC = ("acos", "asin", "atan", "cos", "cosh", "sin", "sinh", "tan", "tanh")

FUNCTIONS_OF_SIZES: Mapping[str, Callable[[Any], Any]] = {
    name: function for name in _TRIGONOMETRIC if (function := private(f"torch:_sym_{name}")) is not None
}
"""Name -> a function of `math` in the form that Dynamo writes for sizes; the interpreter has no rule for these."""
