"""Each operator against the tests of nodes that the package onnx carries, and ONNX Runtime's own against it."""

from __future__ import annotations

import importlib
import pkgutil
import warnings
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from exported_models import run_onnxruntime
from onnx import helper
from onnx.backend.test.case import node as node_cases
from onnx.backend.test.case.test_case import TestCase
from small_graphs import FLOAT, INT64, graph_of, model_of, value
from torch import Tensor

from ort_dynamo.errors import OnnxModelError
from ort_dynamo.onnx_module import OnnxModule
from ort_dynamo.onnx_module.registry import MICROSOFT, known_operators
from ort_dynamo.testing import Tolerance, assert_close

SAMPLE = (
    "add", "argmax", "averagepool", "batchnorm", "cast_like", "clip", "concat", "constantofshape", "conv",
    "convtranspose", "cumsum", "depthtospace", "div", "dropout", "einsum", "expand", "gather", "gatherelements",
    "gathernd", "gelu", "gemm", "groupnormalization", "if", "layernormalization", "logsoftmax", "loop", "lrn", "matmul",
    "max", "maxpool", "mod", "negativeloglikelihoodloss", "onehot", "pad", "pow", "prelu", "range", "reduce_l2",
    "reducemax", "reshape", "resize", "scan", "scatterelements", "scatternd", "sequence_insert", "shape", "slice",
    "softmax", "softmaxcrossentropy", "split", "split_to_sequence", "squeeze", "tile", "topk", "transpose", "trilu",
    "unsqueeze", "upsample", "where",
)  # fmt: skip
"""Modules of onnx.backend.test.case.node, a few for each family."""

ELSEWHERE = {
    "test_resize_downsample_scales_linear_align_corners": "ONNX Runtime takes the whole new size, too",
    "test_resize_downsample_scales_cubic_align_corners": "ONNX Runtime takes the whole new size, too",
    **{f"test_training_dropout{end}": "its numbers are numpy's" for end in ("", "_mask", "_default", "_default_mask")},
}
"""Cases whose expected results are not ours, with the reason."""

REFUSED = (
    "element type",  # strings, 8 bits and less, unsigned integers
    "it is not valid",  # operators, types and attributes of later opsets than the newest supported
    "it cannot be checked",
    "is not supported",
    "supported are",
    "is not a tensor",  # optional and sequence inputs
    "Scan is supported from opset 9 on",
)


def cases(names: tuple[str, ...] | None) -> list[TestCase]:
    """The cases of some modules, or of all; importing a module makes its cases."""
    found = [one.name for one in pkgutil.iter_modules(node_cases.__path__)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in found if names is None else [name for name in names if name in found]:
            importlib.import_module(f"{node_cases.__name__}.{name}")
    return list(node_cases._NodeTestCases)


def as_torch(data: Any) -> Any:
    if isinstance(data, list | tuple):
        return [as_torch(one) for one in data]
    array = onnx.numpy_helper.to_array(data) if isinstance(data, onnx.TensorProto) else np.asarray(data)
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.astype(np.float32)).bfloat16()
    return torch.from_numpy(np.array(array))


def check(case: TestCase) -> bool:
    """Compare a case's results; False for one that is refused, for a reason that there is."""
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    for one in model.opset_import:
        if one.domain == "" and one.version > 23:
            one.version = 23
    try:
        module = OnnxModule(model)
    except OnnxModelError as error:
        if any(reason in str(error) for reason in REFUSED):
            return False
        raise
    for inputs, outputs in case.data_sets:
        found = module.train("train" in case.name)(*as_torch(inputs))
        for index, (mine, theirs) in enumerate(zip(found, as_torch(outputs), strict=True)):
            compare(mine, theirs, f"{case.name}: output {index}", case.rtol)
    return True


def compare(mine: Any, theirs: Any, what: str, relative: float) -> None:
    if isinstance(theirs, list):
        for one, other in zip(mine, theirs, strict=True):
            compare(one, other, what, relative)
        return
    narrow = {torch.float16: Tolerance(1e-2, 1e-3), torch.bfloat16: Tolerance(3e-2, 1e-2)}
    limit = narrow.get(theirs.dtype, Tolerance(relative, 1e-6))  # expected values are rounded, some to three digits
    assert_close(mine.detach(), theirs, what, limit, strides=False)


def test_operators_equal_onnx_test_data() -> None:
    done = [check(case) for case in cases(SAMPLE) if case.name not in ELSEWHERE]
    assert sum(done) > 400


@pytest.mark.slow
def test_all_operators_equal_onnx_test_data() -> None:
    every = cases(None)
    done = [check(case) for case in every if case.name not in ELSEWHERE]
    assert sum(done) > 1000


def test_every_operator_of_onnx_is_one_that_a_schema_has() -> None:
    for (domain, name), versions in known_operators().items():
        if domain == MICROSOFT or name == "SimplifiedLayerNormalization":
            continue
        schemas = {one.since_version for one in onnx.defs.get_all_schemas_with_history() if one.name == name}
        assert schemas, name
        assert all(since == 1 or since in schemas or since == 7 for since in versions), (name, versions)


RUNTIME: list[tuple[str, list[str], int, dict[str, Any]]] = [
    ("FusedMatMul", ["x", "w"], 1, {"alpha": 0.5}),
    ("FusedMatMul", ["x", "u"], 1, {"transB": 1}),
    ("FusedMatMul", ["v", "w2"], 1, {"transA": 1}),
    ("FusedMatMul", ["v", "w3"], 1, {"transBatchA": 1, "transA": 0}),
    ("Gelu", ["x"], 1, {}),
    ("FastGelu", ["x"], 1, {}),
    ("FastGelu", ["x", "s"], 1, {}),
    ("BiasGelu", ["x", "s"], 1, {}),
    ("QuickGelu", ["x"], 1, {"alpha": 1.5}),
    ("SkipLayerNormalization", ["x", "u", "s", "s2"], 1, {"epsilon": 1e-4}),
    ("SkipLayerNormalization", ["x", "u", "s", "s2", "s3"], 4, {}),
    ("SkipSimplifiedLayerNormalization", ["x", "u", "s"], 1, {"epsilon": 1e-4}),
    ("SkipSimplifiedLayerNormalization", ["x", "u", "s"], 4, {}),
    ("SimplifiedLayerNormalization", ["x", "s"], 1, {"axis": -1}),
    ("LayerNormalization", ["x", "s", "s2"], 1, {}),
]


@pytest.mark.parametrize(("name", "inputs", "outputs", "attributes"), RUNTIME)
def test_contrib_operators_equal_onnxruntime(
    name: str, inputs: list[str], outputs: int, attributes: dict[str, Any]
) -> None:
    random = np.random.default_rng(0)
    shapes = {"w": (2, 4, 5), "u": (2, 3, 4), "v": (2, 3, 4), "w2": (2, 3, 5), "w3": (3, 4, 5)}
    shapes.update({"s": (4,), "s2": (4,), "s3": (4,)})
    data = {one: random.normal(size=shape) for one, shape in shapes.items() if one in inputs}
    # ONNX Runtime has the layer norms without a domain: it wrote them so before ONNX had one.
    domain = "" if name in ("LayerNormalization", "SimplifiedLayerNormalization") else MICROSOFT
    results = ["y", "", "", "sum"][:outputs]
    node = helper.make_node(name, inputs, results, domain=domain, **attributes)
    given = [value("x", (2, 3, 4))] if "x" in inputs else []
    model = model_of(graph_of([node], given, [value(one, None) for one in results if one], data), opset=14)
    x = (torch.randn(2, 3, 4),) if given else ()
    for found, expected in zip(OnnxModule(model)(*x), run_onnxruntime(model, x), strict=True):
        assert_close(found.detach(), torch.from_numpy(expected), name, strides=False)


def test_the_bias_of_a_simplified_norm_is_added_to_the_skip() -> None:
    name = "SkipSimplifiedLayerNormalization"  # ONNX Runtime 1.19.2 computes it wrongly
    node = helper.make_node(name, ["x", "u", "s", "b"], ["y", "", "", "sum"], domain=MICROSOFT)
    inputs = [value(one, (2, 4)) for one in "xu"]
    data = {"s": [1.0, 2.0, 3.0, 4.0], "b": [0.5, -0.5, 1.0, 2.0]}
    module = OnnxModule(model_of(graph_of([node], inputs, [value("y", (2, 4)), value("sum", (2, 4))], data)))
    x, u = torch.randn(2, 4), torch.randn(2, 4)
    y, total = (one.detach() for one in module(x, u))
    s, b = module.s.detach(), module.b.detach()
    assert_close(total, x + u + b, "the sum")
    assert_close(y, torch.nn.functional.rms_norm(total, (4,), s, 1e-12), "y")


def test_a_cross_entropy_of_the_runtime_takes_the_ignored_class_as_an_input() -> None:
    node = helper.make_node("SoftmaxCrossEntropyLossInternal", ["x", "t", "", "ignored"], ["y", "p"], domain=MICROSOFT)
    inputs = [value("x", ("n", 3)), value("t", ("n",), INT64)]
    model = model_of(graph_of([node], inputs, [value("y", ()), value("p", ("n", 3))], {"ignored": np.int64(1)}))
    x, t = torch.randn(4, 3), torch.tensor([0, 1, 2, 1])
    y, p = OnnxModule(model)(x, t)
    assert_close(y, torch.nn.functional.cross_entropy(x, t, ignore_index=1), "the loss")
    assert_close(p, torch.log_softmax(x, 1), "the log-probabilities")


OLD: list[tuple[str, int, dict[str, Any], dict[str, Any]]] = [
    ("Clip", 7, {"min": -0.5, "max": 0.5}, {}),
    ("Clip", 11, {}, {"min": np.float32(-0.5), "max": np.float32(0.5)}),
    ("Dropout", 7, {"ratio": 0.4}, {}),
    ("Dropout", 10, {"ratio": 0.4}, {}),
    ("Softmax", 11, {"axis": 1}, {}),
    ("LogSoftmax", 9, {"axis": -2}, {}),
    ("Hardmax", 11, {"axis": 2}, {}),
    ("Slice", 9, {"starts": [1, -3], "ends": [9, -1], "axes": [1, 3]}, {}),
    (
        "Slice",
        10,
        {},
        {"starts": np.array([3]), "ends": np.array([-9]), "axes": np.array([3]), "steps": np.array([-2])},
    ),
    ("Squeeze", 11, {"axes": [0]}, {}),
    ("Unsqueeze", 11, {"axes": [0, -1]}, {}),
    ("Split", 11, {"axis": 3, "split": [1, 3]}, {}),
    ("Split", 13, {"axis": 3}, {"split": np.array([3, 1])}),
    ("Pad", 10, {"pads": [0, 0, 1, 2, 0, 0, 0, 1], "mode": "reflect"}, {}),
    ("Pad", 10, {"pads": [0, 0, 1, 2, 0, 0, 0, 1], "value": 3.0}, {}),
    ("ReduceSum", 12, {"axes": [1, -1], "keepdims": 0}, {}),
    ("ReduceMean", 17, {"axes": [2]}, {}),
    ("ReduceMean", 18, {"keepdims": 0}, {"axes": np.array([2, 3])}),
    ("ReduceL2", 13, {}, {}),
    ("TopK", 9, {"k": 2}, {}),
    ("TopK", 10, {}, {"k": np.array([2])}),
    ("Upsample", 7, {"scales": [1.0, 1.0, 2.0, 1.5]}, {}),
    ("Upsample", 9, {"mode": "linear"}, {"scales": [1.0, 1.0, 2.0, 2.0]}),
    ("Resize", 10, {}, {"scales": [1.0, 1.0, 2.0, 0.5]}),
    ("Resize", 11, {"mode": "linear"}, {"roi": np.zeros(0, np.float32), "scales": [1.0, 1.0, 2.0, 1.5]}),
    ("BatchNormalization", 9, {}, {"s": [1.0, 2, 3], "b": [0.0, 1, 2], "m": [0.0, 0.1, 0.2], "v": [1.0, 2, 3]}),
    ("BatchNormalization", 7, {}, {"s": [1.0, 2, 3], "b": [0.0, 1, 2], "m": [0.0, 0.1, 0.2], "v": [1.0, 2, 3]}),
    ("MaxPool", 8, {"kernel_shape": [2, 2], "auto_pad": "SAME_LOWER"}, {}),
    ("AveragePool", 10, {"kernel_shape": [2, 2], "pads": [1, 1, 0, 0], "ceil_mode": 1, "strides": [2, 2]}, {}),
    ("Scatter", 10, {"axis": 3}, {"i": np.zeros((1, 3, 4, 1), np.int64), "u": np.ones((1, 3, 4, 1))}),
    ("Flatten", 9, {"axis": 2}, {}),
    ("CumSum", 11, {}, {"axis": np.int32(3)}),
    ("OneHot", 9, {"axis": 1}, {"depth": np.float32(3), "values": [0.0, 1.0]}),
]


@pytest.mark.parametrize(("name", "opset", "attributes", "data"), OLD)
def test_older_versions_equal_onnxruntime(
    name: str, opset: int, attributes: dict[str, Any], data: dict[str, Any]
) -> None:
    results = ["y", "z"] if name in ("TopK", "Split") else ["y"]
    node = helper.make_node(name, ["x", *data], results, **attributes)
    kinds = [INT64 if name == "TopK" and one == "z" else FLOAT for one in results]
    outputs = [value(one, None, kind) for one, kind in zip(results, kinds, strict=True)]
    model = model_of(graph_of([node], [value("x", (1, 3, 4, 4))], outputs, data), opset)
    x = torch.randint(3, (1, 3, 4, 4)).float() if name == "OneHot" else torch.randn(1, 3, 4, 4)
    for found, expected in zip(OnnxModule(model)(x), run_onnxruntime(model, (x,)), strict=True):
        assert_close(found.detach(), torch.from_numpy(expected), name, strides=False)


SCALES = {"roi": None, "scales": [1.0, 1.0, 2.0, 1.5]}
PADS = {"pads": np.array([1, 2, 0, 1])}
WINDOWS = {"kernel_shape": [2, 3], "pads": [1, 0, 0, 1], "strides": [2, 2]}

GRADIENTS: list[tuple[str, dict[str, Any], tuple[int, ...], dict[str, Any]]] = [
    ("Resize", {"mode": "linear"}, (1, 1, 3, 4), SCALES),
    ("Resize", {"mode": "cubic", "exclude_outside": 1}, (1, 1, 3, 4), SCALES),
    ("Resize", {"mode": "nearest"}, (1, 1, 3, 4), SCALES),
    ("Pad", {"mode": "reflect"}, (3, 4), PADS),
    ("Pad", {"mode": "edge"}, (3, 4), PADS),
    ("Pad", {"mode": "constant"}, (3, 4), {"pads": np.array([1, -2, 0, 1])}),
    ("AveragePool", {**WINDOWS, "ceil_mode": 1}, (1, 2, 4, 5), {}),
    ("AveragePool", {**WINDOWS, "count_include_pad": 1}, (1, 2, 4, 5), {}),
    ("MaxPool", WINDOWS, (1, 2, 4, 5), {}),
    ("LRN", {"size": 4}, (1, 6, 2, 2), {}),
    ("ScatterND", {"reduction": "mul"}, (4, 2), {"i": np.array([[1], [3]]), "u": [[2.0, 3.0], [4.0, 5.0]]}),
    ("Gather", {"axis": 1}, (3, 4), {"i": np.array([[0, -1], [2, 0]])}),
    ("TopK", {"axis": -1}, (3, 4), {"k": np.array([2])}),
    ("CumSum", {"exclusive": 1, "reverse": 1}, (3, 4), {"axis": np.int64(1)}),
    ("PRelu", {}, (3, 4), {"slope": [0.5] * 4}),
    ("ReduceProd", {"axes": [0, 1], "keepdims": 0}, (2, 3), {}),
]


@pytest.mark.parametrize(("name", "attributes", "shape", "data"), GRADIENTS)
def test_gradients_of_composed_operators_are_right(
    name: str, attributes: dict[str, Any], shape: tuple[int, ...], data: dict[str, Any]
) -> None:
    names = ["x", *("" if one is None else key for key, one in data.items())]
    node = helper.make_node(name, names, ["y", "places"] if name == "TopK" else ["y"], **attributes)
    there = {key: one for key, one in data.items() if one is not None}
    module = OnnxModule(model_of(graph_of([node], [value("x", shape)], [value("y", None)], there))).double()
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)

    def first(x: Tensor) -> Tensor:
        return module(x)[0]

    assert torch.autograd.gradcheck(first, (x,))
