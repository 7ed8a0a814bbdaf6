"""Facts of kernels: sizes of 0, NaN and infinities, fusions, and the dtypes that torch's norms give in half types.

Small models, run as they are by an ONNX Runtime session on a device or by torch. Each fact has an expected value:
on CUDA the one that lowerings rely on or that a defect's row states, and none where no form depends on it.
`bench.device` prints it beside the value that it found; `test_kernel_facts.py` asserts them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from ort_dynamo.runtime.installed.capabilities import installed_runtime, omitted_optimizers
from ort_dynamo.runtime.installed.importing import onnxruntime
from ort_dynamo.runtime.installed.providers import find_target

__all__ = ["FACTS", "PATTERNS", "Fact"]

NAN, INF = float("nan"), float("inf")
REFUSED = "refused"
DTYPES = {"float32": np.float32, "float16": np.float16}
PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}


@dataclass(frozen=True)
class Fact:
    """One small model.

    Attributes:
        find: device type -> the value found there, in short words.
        expected: device type -> the words that are expected; "not ..." takes all others. None: nothing depends on it.
    """

    find: Callable[[str], str]
    expected: Mapping[str, str | None]

    def meets(self, device: str, found: str) -> bool:
        """Tell if `found` is as expected on a type of device."""
        expected = self.expected.get(device)
        if expected is None:
            return True
        return found != expected.removeprefix("not ") if expected.startswith("not ") else found == expected


# -- sessions ----------------------------------------------------------------------------------------------------------


def _model(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 20]> test {text}')


def results(
    model: onnx.ModelProto, feeds: Mapping[str, Any], device: str, disabled_optimizers: Sequence[str] | None
) -> list[Any]:
    """The results of a model on a device, with ONNX Runtime's optimizers but for some, or (None) without any."""
    ort = onnxruntime()
    options, run_options = ort.SessionOptions(), ort.RunOptions()
    options.log_severity_level = run_options.log_severity_level = 4  # it is expected to refuse
    levels = ort.GraphOptimizationLevel
    options.graph_optimization_level = levels.ORT_DISABLE_ALL if disabled_optimizers is None else levels.ORT_ENABLE_ALL
    session = ort.InferenceSession(
        model.SerializeToString(),
        options,
        providers=[PROVIDERS[device]],
        disabled_optimizers=list(disabled_optimizers or ()),
        enable_fallback=0,
    )
    if PROVIDERS[device] not in session.get_providers():
        raise RuntimeError(f"{PROVIDERS[device]} does not load")
    found: list[Any] = session.run(None, dict(feeds), run_options)
    return found


def spelled(value: Any) -> str:
    """A result as its dtype, shape and numbers."""
    return " ".join([f"{value.dtype}{list(value.shape)}", *(f"{number:.6g}" for number in value.ravel())])


def _found(text: str, feeds: Mapping[str, Any], device: str) -> str:
    model = _model(text)
    find_target(device)  # a provider that is not there is no refusal
    try:
        return "; ".join(map(spelled, results(model, feeds, device, None)))
    except Exception as error:  # pybind has some ten unrelated classes
        if "does not load" in str(error):
            raise
        return REFUSED


# -- sizes of 0 --------------------------------------------------------------------------------------------------------

NEUTRAL = {
    **dict.fromkeys(("ReduceSum", "ReduceMean", "ReduceL1", "ReduceL2", "ReduceSumSquare"), "0"),
    **dict.fromkeys(("ReduceMax", "ReduceLogSum", "ReduceLogSumExp"), "-inf"),
    "ReduceMin": "inf",
    "ReduceProd": "1",
}
"""Reduction -> its result for no elements."""


def _reductions() -> dict[str, Fact]:
    facts = {}
    for operator, neutral in NEUTRAL.items():
        for keepdims in (0, 1):
            for shape, axes, kept in (((0, 3), [0], [3]), ((3, 0), [0], [0]), ((0, 3), [0, 1], [])):
                said = ", ".join(map(str, axes))
                text = (
                    f"(float[n, m] x) => (y) <int64[{len(axes)}] axes = {{{said}}}>"
                    f"{{ y = {operator} <keepdims = {keepdims}> (x, axes) }}"
                )
                result = [1 if axis in axes else size for axis, size in enumerate(shape)] if keepdims else kept
                numbers = [neutral] * int(np.prod(result))
                reduces_nothing = any(not shape[axis] for axis in axes)
                facts[f"{operator} of {list(shape)} over {said}, keepdims {keepdims}"] = Fact(
                    partial(_found, text, {"x": np.zeros(shape, np.float32)}),
                    {
                        "cpu": " ".join([f"float32{result}", *numbers]),
                        "cuda": REFUSED if reduces_nothing and not keepdims else None,
                    },
                )
    return facts


def _empty_triangles() -> dict[str, Fact]:
    text = "(float[n, m] x) => (y) { y = Trilu (x) }"
    return {
        f"Trilu of {list(shape)}": Fact(
            partial(_found, text, {"x": np.zeros(shape, np.float32)}),
            {"cpu": f"float32{list(shape)}", "cuda": REFUSED},
        )
        for shape in ((0, 3), (3, 0), (0, 0))
    }


# -- NaN and infinities ------------------------------------------------------------------------------------------------

EXTREME = "(T[n] x) => (y) <int64[1] axes = {0}> { y = OPERATOR (x, axes) }"
ROW = "(T[n] x) => (y) { y = OPERATOR <axis = 0> (x) }"
CLIP = """(T[n] x) => (y) <float low = {0.0}, float high = {1.0}>
    { a = CastLike (low, x)  b = CastLike (high, x)  y = Clip (x, a, b) }"""
HARD = "(T[n] x) => (y) { y = HardSigmoid <alpha = 0.25, beta = 0.5> (x) }"
WHERE = "(T[n] x) => (y) <float low = {0.0}> { a = CastLike (low, x)  i = IsNaN (x)  y = Where (i, a, x) }"
PAIR = "(T[n] x) => (y) <float low = {0.0}> { a = CastLike (low, x)  y = OPERATOR (x, a) }"
ALONE = "(T[n] x) => (y) { y = OPERATOR (x) }"

NUMBERS: dict[str, tuple[str, list[float], str, str | None]] = {
    "ReduceMax of -inf": (EXTREME, [-INF] * 3, "[1] -inf", "not [1] -inf"),
    "ReduceMin of inf": (EXTREME, [INF] * 3, "[1] inf", "not [1] inf"),
    "ReduceMax of NaN, 1, 2": (EXTREME, [NAN, 1, 2], "[1] nan", None),
    "ReduceMax of 1, 2, NaN": (EXTREME, [1, 2, NAN], "[1] 2", None),
    "Softmax of -inf": (ROW, [-INF] * 3, "[3] nan nan nan", "[3] nan nan nan"),
    "Softmax of NaN, 1, 2": (ROW, [NAN, 1, 2], "[3] nan nan nan", "[3] nan nan nan"),
    "Softmax of inf, 1, 2": (ROW, [INF, 1, 2], "[3] nan nan nan", "[3] nan nan nan"),
    "LogSoftmax of -inf": (ROW, [-INF] * 3, "[3] nan nan nan", "[3] nan nan nan"),
    "Clip of NaN, inf, -inf": (CLIP, [NAN, INF, -INF], "[3] nan 1 0", "[3] nan 1 0"),
    "HardSigmoid of NaN, inf, -inf": (HARD, [NAN, INF, -INF], "[3] nan 1 0", "[3] nan 1 0"),
    "Where(IsNaN) of NaN, inf, -inf": (WHERE, [NAN, INF, -INF], "[3] 0 inf -inf", "[3] 0 inf -inf"),
    "Max of NaN, inf, -inf and 0": (PAIR, [NAN, INF, -INF], "[3] nan inf 0", "[3] nan inf 0"),
    "Min of NaN, inf, -inf and 0": (PAIR, [NAN, INF, -INF], "[3] nan 0 -inf", "[3] nan 0 -inf"),
    "Relu of NaN, inf, -inf": (ALONE, [NAN, INF, -INF], "[3] nan inf 0", "[3] nan inf 0"),
}
"""Name, which begins with the operator -> model, input, expected on the CPU and on CUDA."""


def _numbers() -> dict[str, Fact]:
    facts = {}
    for name, (text, numbers, cpu, cuda) in NUMBERS.items():
        for dtype, kind in DTYPES.items():
            operator = name.partition(" ")[0]
            model = text.replace("OPERATOR", operator).replace("T[", "float[" if dtype == "float32" else f"{dtype}[")
            said = {"cpu": cpu, "cuda": cuda}
            facts[f"{name}, {dtype}"] = Fact(
                partial(_found, model, {"x": np.array(numbers, kind)}),
                {device: words and _with(dtype, words) for device, words in said.items()},
            )
    return facts


def _with(dtype: str, words: str) -> str:
    return f"not {dtype}{words[4:]}" if words.startswith("not ") else f"{dtype}{words}"


# -- ONNX Runtime's optimizers -----------------------------------------------------------------------------------------

PATTERNS = {
    "SkipLayerNormFusion": """(float[2,3,8] x, float[2,3,8] y, float[8] s, float[8] b)
        => (float[2,3,8] o, float[2,3,1] m, float[2,3,1] r)
        { a = Add (x, y)  o, m, r = LayerNormalization (a, s, b) }""",
    "LayerNormFusion, rows of one": """(float[2,3,1] x, float[1] s, float[1] b) => (float[2,3,1] o)
        <float two = {2.0}, float little = {0.00001}, int64[1] last = {-1}>
        { m = ReduceMean (x, last)  c = Sub (x, m)  p = Pow (c, two)  v = ReduceMean (p, last)  e = Add (v, little)
          d = Sqrt (e)  n = Div (c, d)  t = Mul (n, s)  o = Add (t, b) }""",
    "SimplifiedLayerNormFusion": """(float[2,3,8] x, float[8] s) => (float[2,3,8] o)
        <float two = {2.0}, float little = {0.00001}, int64[1] last = {-1}>
        { p = Pow (x, two)  v = ReduceMean (p, last)  e = Add (v, little)  d = Sqrt (e)
          n = Div (x, d)  o = Mul (n, s) }""",
    "BiasGeluFusion": """(float[3,8] x, float[8] b) => (float[3,8] o) { a = Add (x, b)  o = Gelu (a) }""",
    "GeluFusion": """(float[3,8] x) => (float[3,8] o)
        <float root = {1.4142135381698608}, float one = {1.0}, float half = {0.5}>
        { d = Div (x, root)  e = Erf (d)  a = Add (e, one)  m = Mul (x, a)  o = Mul (m, half) }""",
    "FastGeluFusion": """(float[3,8] x) => (float[3,8] o) { o = Gelu <approximate = "tanh"> (x) }""",
    "QuickGeluFusion": """(float[3,8] x) => (float[3,8] o) <float scale = {1.702}>
        { a = Mul (x, scale)  s = Sigmoid (a)  o = Mul (x, s) }""",
    "BiasSoftmaxFusion": """(float[2,4,6,6] x, float[2,1,1,6] b) => (float[2,4,6,6] o)
        { a = Add (x, b)  o = Softmax <axis = -1> (a) }""",
    "MatmulTransposeFusion": """(float[2,5,3] x, float[2,5,4] y) => (float[2,3,4] o)
        { t = Transpose <perm = [0, 2, 1]> (x)  o = MatMul (t, y) }""",
    "MatMulScaleFusion": """(float[2,3,5] x, float[2,5,4] y) => (float[2,3,4] o) <float scale = {0.125}>
        { m = MatMul (x, y)  o = Mul (m, scale) }""",
    "ConvActivationFusion": """(float[2,4,8,8] x, float[4,4,3,3] w, float[4] b, float[2,4,8,8] z) => (float[2,4,8,8] o)
        { c = Conv <pads = [1, 1, 1, 1]> (x, w, b)  a = Add (c, z)  o = Relu (a) }""",
    "GatherToSplitFusion": """(float[2,3,8] x) => (float[2,8] o, float[2,8] p, float[2,8] q)
        <int64 a = {0}, int64 b = {1}, int64 c = {2}>
        { o = Gather <axis = 1> (x, a)  p = Gather <axis = 1> (x, b)  q = Gather <axis = 1> (x, c) }""",
}
"""Optimizer -> a model with its pattern, and all outputs that it may leave unwritten."""

EQUAL = "equal"


def _with_optimizers(text: str, leaves_out: bool, device: str) -> str:
    """The largest difference of a model's results with optimizers from the CPU's without, if it is one."""
    model = _model(text)
    onnx.checker.check_model(model)
    generator = np.random.default_rng(0)
    feeds = {
        value.name: generator.normal(size=[dim.dim_value for dim in value.type.tensor_type.shape.dim]).astype("f4")
        for value in model.graph.input
    }
    without = omitted_optimizers([ir.DataType.FLOAT], find_target(device)) if leaves_out else []
    expected = results(model, feeds, "cpu", None)
    try:
        found = results(model, feeds, device, without)
    except Exception as error:  # pybind has some ten unrelated classes
        return f"{REFUSED}: {str(error).splitlines()[0]}"
    for value, ours, theirs in zip(model.graph.output, found, expected, strict=True):
        if ours is None:
            return f"output {value.name} is not written"
        if not np.allclose(ours, theirs, rtol=1e-3, atol=1e-3):
            return f"output {value.name} is off by {np.abs(ours - theirs).max():.3g}"
    return EQUAL


def _optimizers() -> dict[str, Fact]:
    facts = {}
    for name, text in PATTERNS.items():
        with_ours = partial(_with_optimizers, text, True)
        facts[f"{name}, as sessions have it"] = Fact(with_ours, {"cpu": EQUAL, "cuda": EQUAL})
        facts[f"{name}, with all optimizers"] = Fact(partial(_with_optimizers, text, False), {"cpu": EQUAL})
    return facts


# -- torch's norms in half types ---------------------------------------------------------------------------------------

Ones = Callable[..., Tensor]
aten = torch.ops.aten
NORMS: dict[str, Callable[[Ones, Ones], Sequence[Tensor]]] = {
    "native_layer_norm": lambda t, p: aten.native_layer_norm(t(2, 3), [3], p(3), p(3), 1e-5),
    "native_group_norm": lambda t, p: aten.native_group_norm(t(2, 4, 3), p(4), p(4), 2, 4, 3, 2, 1e-5),
    "native_batch_norm": lambda t, p: aten.native_batch_norm(t(2, 3, 4), p(3), p(3), p(3), p(3), True, 0.1, 1e-5),
    "_native_batch_norm_legit.no_stats": lambda t, p: aten._native_batch_norm_legit.no_stats(
        t(2, 3, 4), p(3), p(3), True, 0.1, 1e-5
    ),
}
"""Name -> its results of a tensor and parameters."""


def _norm(name: str, dtype: torch.dtype, parameters: torch.dtype, device: str) -> str:
    def ones(kind: torch.dtype, *shape: int) -> Tensor:
        return torch.ones(shape, dtype=kind, device=device)

    call = partial(NORMS[name], partial(ones, dtype), partial(ones, parameters))
    with FakeTensorMode():
        promised = _dtypes(call)
    given = _dtypes(call)
    return given if given == promised else f"{given}; its fake promises {promised}"


def _dtypes(call: Callable[[], Sequence[Tensor]]) -> str:
    try:
        return ", ".join(str(result.dtype).removeprefix("torch.") for result in call())
    except RuntimeError:
        return REFUSED


def _norms() -> dict[str, Fact]:
    return {
        f"{name}, {_name(dtype)} and parameters in {_name(parameters)}": Fact(
            partial(_norm, name, dtype, parameters), {}
        )
        for name in NORMS
        for dtype in (torch.float16, torch.bfloat16)
        for parameters in (dtype, torch.float32)
    }


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# -- integers, by the nodes that stand in for kernels which CUDA lacks -------------------------------------------------

BIG = float(1 << 52)
INTEGERS: dict[str, tuple[str, Any, str]] = {
    "Div of int64 truncates": (
        "(int64[4] x) => (y) <int64 half = {4294967296}> { y = Div(x, half) }",
        np.array([-1, -(1 << 33) - 1, (1 << 32) - 1, 3 << 32]),
        "int64[4] 0 -2 0 3",
    ),
    "Mul of int64 wraps around": (
        "(int64[2] x) => (y) <int64 most = {-9223372036854775808}> { p = Mul(x, most)  y = Equal(p, most) }",
        np.array([1, 2]),
        "bool[2] 1 0",
    ),
    "ReduceSum of float64 has 53 bits": (
        "(double[3000] x) => (y) <int64[1] axes = {0}, double[1] big = {4503599627370496.0}>"
        "{ s = ReduceSum(x, axes)  y = Sub(s, big) }",
        np.array([BIG, *[1.0] * 2999]),
        "float64[1] 2999",
    ),
    "ReduceMax of float64 has 53 bits": (
        "(double[3] x) => (y) <int64[1] axes = {0}, double[1] big = {4503599627370496.0}>"
        "{ s = ReduceMax(x, axes)  y = Sub(s, big) }",
        np.array([BIG + 1, BIG + 2, BIG]),
        "float64[1] 2",
    ),
    "Concat joins int64": (
        "(int64[1, 2] x) => (y) <int64[1, 1] end = {-100}> { y = Concat <axis = 1> (x, end) }",
        np.array([[5, -6]]),
        "int64[1, 3] 5 -6 -100",
    ),
    "Cast of int64 to float64 and back": (
        "(int64[2] x) => (y) { d = Cast <to = 11> (x)  i = Cast <to = 7> (d)  y = Equal(i, x) }",
        np.array([-(1 << 53), (1 << 53) - 1]),
        "bool[2] 1 1",
    ),
}
"""Name -> a model, its input, and its result everywhere."""


def _integers() -> dict[str, Fact]:
    def find(text: str, given: Any, device: str) -> str:
        return _found(text, {"x": given}, device)

    return {
        name: Fact(partial(find, text, given), dict.fromkeys(("cpu", "cuda"), right))
        for name, (text, given, right) in INTEGERS.items()
    }


OTHERWISE_IN_TRAINING = ("ReduceMax of [", "SkipLayerNormFusion")
"""Beginnings of the names of facts that are others on the CPU of the training build: no lowering needs them there."""


def _facts() -> dict[str, Fact]:
    facts = {**_reductions(), **_empty_triangles(), **_numbers(), **_integers(), **_optimizers(), **_norms()}
    if not installed_runtime().has_gradient_kernels:
        return facts
    return {
        name: Fact(fact.find, {**fact.expected, "cpu": None}) if name.startswith(OTHERWISE_IN_TRAINING) else fact
        for name, fact in facts.items()
    }


FACTS: dict[str, Fact] = _facts()
"""Name -> fact."""
