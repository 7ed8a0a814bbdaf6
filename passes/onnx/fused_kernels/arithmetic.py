"""ONNX operators as scalar functions of a kernel.

A formula is of float32 for a half type, and its result is rounded once, as ONNX Runtime's kernels compute.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from ort_dynamo.graph.marks import STOPS
from ort_dynamo.passes.onnx.fused_kernels.kernel import WIDE, Apply, Constant, Step
from ort_dynamo.targets.target import OWN_KERNELS

__all__ = ["Steps", "computes", "lowered", "needs_kernel"]

FLOATS = frozenset({ir.DataType.BFLOAT16, ir.DataType.DOUBLE, ir.DataType.FLOAT, ir.DataType.FLOAT16})
_INTEGERS = frozenset({ir.DataType.INT32, ir.DataType.INT64})
_NUMBERS = FLOATS | _INTEGERS


class Steps:
    """The steps of a kernel that is being made; equal ones are one."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._known: dict[str, int] = {}

    def add(self, step: Step) -> int:
        """Return the index of a step."""
        key = repr(step)  # 0 and -0 are equal, NaN is not
        if key not in self._known:
            self._known[key] = len(self.steps)
            self.steps.append(step)
        return self._known[key]

    def constant(self, value: float | int | bool, dtype: ir.DataType) -> int:
        """Return a scalar, rounded to the type."""
        return self.add(Constant(dtype, np.asarray(value).astype(dtype.numpy()).item()))

    def apply(self, function: str, *arguments: int) -> int:
        """Return a function of steps of one type, which the result has, too."""
        return self.add(Apply(self.steps[arguments[0]].dtype, function, arguments))

    def compare(self, function: str, *arguments: int) -> int:
        """Return a function whose result is a bool."""
        return self.add(Apply(ir.DataType.BOOL, function, arguments))

    def where(self, condition: int, first: int, second: int) -> int:
        """One of two steps."""
        return self.add(Apply(self.steps[first].dtype, "where", (condition, first, second)))

    def convert(self, argument: int, dtype: ir.DataType) -> int:
        """Return a step in another type."""
        if self.steps[argument].dtype == dtype:
            return argument
        return self.add(Apply(dtype, "convert", (argument,)))


Formula = Callable[[Steps, ir.Node, Sequence[int]], int]


def _number(steps: Steps, like: int, value: float) -> int:
    return steps.constant(value, steps.steps[like].dtype)


def _sigmoid(steps: Steps, x: int) -> int:
    one = _number(steps, x, 1.0)
    return steps.apply("div", one, steps.apply("add", one, steps.apply("exp", steps.apply("neg", x))))


def _gelu(steps: Steps, node: ir.Node, arguments: Sequence[int]) -> int:
    if node.attributes.get_string("approximate", "none") == "tanh":
        return _fast_gelu(steps, node, arguments)
    (x,) = arguments
    scaled = steps.apply("mul", x, _number(steps, x, math.sqrt(0.5)))
    if steps.steps[x].dtype == ir.DataType.FLOAT:
        return steps.apply("mul", x, _normal_distribution(steps, scaled))
    twice = steps.apply("add", steps.apply("erf", scaled), _number(steps, x, 1.0))
    return steps.apply("mul", steps.apply("mul", x, twice), _number(steps, x, 0.5))


def _normal_distribution(steps: Steps, scaled: int) -> int:
    """(1 + erf s) / 2 of a float32 s, which is erfc(|s|) / 2 below 0, and 1 less that above.

    The device's erf selects each of seven coefficients by |s|, so it takes twice the instructions of `half_erfc`.
    """
    tail = steps.apply("half_erfc", steps.apply("abs", scaled))
    is_negative = steps.compare("lt", scaled, _number(steps, scaled, 0.0))
    return steps.where(is_negative, tail, steps.apply("sub", _number(steps, scaled, 1.0), tail))


def _fast_gelu(steps: Steps, node: ir.Node, arguments: Sequence[int]) -> int:
    """0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))); FastGelu has a second input, which is added first."""
    x = arguments[0] if len(arguments) == 1 else steps.apply("add", *arguments)
    cubed = steps.apply("mul", steps.apply("mul", x, x), x)
    inner = steps.apply("add", x, steps.apply("mul", cubed, _number(steps, x, 0.044715)))
    bent = steps.apply("tanh", steps.apply("mul", inner, _number(steps, x, math.sqrt(2 / math.pi))))
    twice = steps.apply("add", bent, _number(steps, x, 1.0))
    return steps.apply("mul", steps.apply("mul", x, twice), _number(steps, x, 0.5))


def _bias_gelu(steps: Steps, node: ir.Node, arguments: Sequence[int]) -> int:
    return _gelu(steps, node, [steps.apply("add", *arguments)])


def _quick_gelu(steps: Steps, node: ir.Node, arguments: Sequence[int]) -> int:
    (x,) = arguments
    return steps.apply("mul", x, _sigmoid(steps, steps.apply("mul", x, _attribute(steps, node, x, "alpha", 1.702))))


def _hard_sigmoid(steps: Steps, node: ir.Node, arguments: Sequence[int]) -> int:
    (x,) = arguments
    alpha, beta = (_attribute(steps, node, x, *given) for given in (("alpha", 0.2), ("beta", 0.5)))
    match steps.steps[x]:
        case Apply(ir.DataType.FLOAT, "erf", (scaled,)) if alpha == beta == _number(steps, x, 0.5):
            return _normal_distribution(steps, scaled)
    line = steps.apply("add", steps.apply("mul", x, alpha), beta)
    return steps.apply("max", steps.apply("min", line, _number(steps, x, 1.0)), _number(steps, x, 0.0))


def _leaky_relu(steps: Steps, node: ir.Node, arguments: Sequence[int]) -> int:
    (x,) = arguments
    scaled = steps.apply("mul", x, _attribute(steps, node, x, "alpha", 0.01))
    return steps.where(steps.compare("ge", x, _number(steps, x, 0.0)), x, scaled)


def _attribute(steps: Steps, node: ir.Node, like: int, name: str, default: float) -> int:
    return _number(steps, like, node.attributes.get_float(name, default))


def _folded(function: str) -> Formula:
    """Return an operator of any number of inputs."""

    def formula(steps: Steps, node: ir.Node, arguments: Sequence[int]) -> int:
        result = arguments[0]
        for argument in arguments[1:]:
            result = steps.apply(function, result, argument)
        return result

    return formula


def _named(function: str) -> Formula:
    return lambda steps, node, arguments: steps.apply(function, *arguments)


def _compared(function: str) -> Formula:
    return lambda steps, node, arguments: steps.compare(function, *arguments)


def _where(steps: Steps, node: ir.Node, arguments: Sequence[int]) -> int:
    condition, first, second = arguments
    if STOPS in node.metadata_props:
        return steps.add(Apply(steps.steps[second].dtype, "stop", (condition, second)))
    return steps.where(condition, first, second)


def _cast(steps: Steps, node: ir.Node, arguments: Sequence[int]) -> int:
    return steps.convert(arguments[0], ir.DataType(node.attributes.get_int("to")))


_FORMULAS: Mapping[str, tuple[frozenset[ir.DataType], Formula]] = {
    **{op: (FLOATS, _named(op.lower())) for op in ("Ceil", "Cos", "Div", "Erf", "Exp", "Floor", "Log", "Round")},
    **{op: (FLOATS, _named(op.lower())) for op in ("Sin", "Sqrt", "Tanh")},
    **{op: (_NUMBERS, _named(op.lower())) for op in ("Abs", "Add", "Mul", "Neg", "Sub")},
    **{op: (FLOATS, _folded(op.lower())) for op in ("Max", "Min")},
    "Sum": (FLOATS, _folded("add")),
    "Reciprocal": (FLOATS, lambda steps, _, given: steps.apply("div", _number(steps, given[0], 1.0), given[0])),
    "Relu": (FLOATS, lambda steps, _, given: steps.apply("max", given[0], _number(steps, given[0], 0.0))),
    "Sigmoid": (FLOATS, lambda steps, _, given: _sigmoid(steps, given[0])),
    "HardSigmoid": (FLOATS, _hard_sigmoid),
    "LeakyRelu": (FLOATS, _leaky_relu),
    "Gelu": (FLOATS, _gelu),
    "BiasGelu": (FLOATS, _bias_gelu),
    "FastGelu": (FLOATS, _fast_gelu),
    "QuickGelu": (FLOATS, _quick_gelu),
    "IsNaN": (FLOATS, _compared("isnan")),
    **{f"Bitwise{op}": (_INTEGERS, _named(f"bit{op.lower()}")) for op in ("And", "Or", "Xor")},
    "Equal": (_NUMBERS | {ir.DataType.BOOL}, _compared("eq")),
    "Greater": (_NUMBERS, _compared("gt")),
    "GreaterOrEqual": (_NUMBERS, _compared("ge")),
    "Less": (_NUMBERS, _compared("lt")),
    "LessOrEqual": (_NUMBERS, _compared("le")),
    "And": (frozenset({ir.DataType.BOOL}), _compared("and")),
    "Or": (frozenset({ir.DataType.BOOL}), _compared("or")),
    "Xor": (frozenset({ir.DataType.BOOL}), _compared("xor")),
    "Not": (frozenset({ir.DataType.BOOL}), _compared("not")),
    "Where": (_NUMBERS | {ir.DataType.BOOL}, _where),
    "Cast": (_NUMBERS | {ir.DataType.BOOL}, _cast),
}
"""Operator -> the types of its first input (of Where: the second) with which it is computed, and how.

Division of integers is left out: ONNX Runtime's truncates, and the devices' do not agree on zero.
"""

_ROUNDED = frozenset({"Cast", "Where"})
"""Operators that compute nothing, so that nothing is widened."""


def needs_kernel(node: ir.Node) -> bool:
    """Check whether a node has to be a fused kernel, or a part of one, because the provider has no kernel for it."""
    return not node.domain and node.op_type in OWN_KERNELS


def computes(node: ir.Node) -> bool:
    """Check whether a fused kernel can compute the node: the table has the operator, and takes its types."""
    if node.domain not in ("", "com.microsoft") or node.op_type not in _FORMULAS or None in node.inputs:
        return False
    typed = node.inputs[1 if node.op_type == "Where" else 0]
    types, _ = _FORMULAS[node.op_type]
    if typed is None or typed.dtype not in types:
        return False
    target = node.outputs[0].dtype
    return target in _NUMBERS | {ir.DataType.BOOL} and (node.op_type != "Cast" or _casts(node, target))


def _casts(node: ir.Node, target: ir.DataType) -> bool:
    """Check whether the target type holds the values of a cast; devices convert values that do not fit differently."""
    source = node.inputs[0]
    return source is not None and (target not in _INTEGERS or source.dtype in _INTEGERS | {ir.DataType.BOOL})


def lowered(steps: Steps, node: ir.Node, arguments: Sequence[int]) -> int:
    """Add the steps of a node that `computes` takes.

    Args:
        steps: the list that gets the steps.
        node: the node, which has one output.
        arguments: the step of each input.

    Returns:
        The step of the output.
    """
    _, formula = _FORMULAS[node.op_type]
    if node.op_type in _ROUNDED:
        return formula(steps, node, arguments)
    wide = [steps.convert(one, WIDE.get(steps.steps[one].dtype, steps.steps[one].dtype)) for one in arguments]
    result, dtype = formula(steps, node, wide), node.outputs[0].dtype
    assert dtype is not None
    return steps.convert(result, dtype)
