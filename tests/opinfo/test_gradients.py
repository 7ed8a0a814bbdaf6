"""Gradients in float64 against finite differences, of every lowering that has a derivative, run in ONNX Runtime.

Each operator of PyTorch's database is checked with one small sample; the slow test takes all samples that call other
operators. The table says which lowerings each of them checks, and gradients_by_hand.py has functions for the others.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torchgen
import yaml
from gradient_lowerings import CHECKED_BY
from gradients import Case, cases_of, check_gradients, differentiable, small_case
from gradients_by_hand import WRITTEN, Written
from opinfo_samples import operators
from torch import Tensor
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import gradcheck
from torch.fx import Graph, GraphModule

from ort_dynamo.compilation.compiler import Compilation
from ort_dynamo.compilation.events import Listener
from ort_dynamo.lowering.registry import eager_only, registered
from ort_dynamo.options.groups import parse_options
from ort_dynamo.runtime.installed.capabilities import installed_runtime
from ort_dynamo.torch_internals.kernels.operators import aten

RANDOM = "its result is drawn anew: the difference is that of the mean, while torch gives no gradient to it"
NARROWER = "its result has fewer digits than the differences of the arguments"

NOT_CHECKED = {
    "__rpow__": "powers of negative numbers are nan",
    "as_strided_scatter": "its sample's input is overwritten in whole, and torch's gradient of it is not zero",
    "bfloat16": NARROWER,
    "cfloat": NARROWER,
    "chalf": NARROWER,
    "float": NARROWER,
    "half": NARROWER,
    "nn.functional.max_unpool1d": "two indices of its sample are equal, where torch defines no result",
    "normal": RANDOM,
    "normal.number_mean": RANDOM,
    "sparse.mm.reduce": "gradcheck needs dense tensors",
    "sparse.sampled_addmm": "gradcheck needs dense tensors",
}
"""Operator -> the reason why gradcheck refuses eager mode, too, with the small sample."""

IN_TORCH = {
    "cdouble": "complex",
    "fft.fft": "complex",
    "fft.fft2": "complex",
    "fft.fftn": "complex",
    "fft.ifft": "complex",
    "fft.ifft2": "complex",
    "fft.ifftn": "complex",
    "fft.ihfft": "complex",
    "fft.ihfftn": "complex",
    "fft.rfft": "complex",
    "fft.rfftn": "complex",
    "linalg.eig": "complex",
    "linalg.eigvals": "complex",
    "to_sparse": "sparse",
    "view_as_complex": "complex",
}
"""Operator -> the reason why torch runs all nodes of its sample."""

CHOSEN = frozenset({"linalg.solve_triangular"})
"""Operators that torch runs by choice in any dtype; the others that it runs by choice are float32's."""

PLACED: Mapping[str, Any] = {"backend": "ort_train", "dynamic": False, "options": {"placement": "onnxruntime"}}

EXCLUDED = {
    "aten._fused_rms_norm.default": "CUDA's; test_gradients_of_an_operator_of_cuda has it",
    "aten._fused_rms_norm_backward.default": "as its forward",
    "aten._grouped_mm.default": "torch's takes no float64",
    "aten._linalg_det.default": "where it has a gradient, torch runs it",
    "aten._scaled_dot_product_flash_attention.default": "CUDA's; test_gradients_of_an_operator_of_cuda has it",
    "aten._scaled_dot_product_flash_attention_backward.default": "as its forward",
    "aten.alias.default": "an alias that has a gradient is removed before lowering",
    "aten.chunk.default": "no graph has it: torch traces a split",
    "aten.lift.default": "no graph has it: autograd traces through",
    "aten.lift_fresh.default": "no graph has it: autograd traces through",
    "aten.mkldnn_rnn_layer.default": "torch's takes no float64",
    **{
        f"aten.special_bessel_{name}.default": "in float64 torch runs it, whose result has the precision of float32"
        for name in ("j0", "j1", "y0", "y1")
    },
    "aten.native_batch_norm.default": "no graph has it: torch traces a function without writes",
}
"""Lowering with a derivative -> the reason why no gradient in float64 checks it."""

IS_TRAINING_BUILD = installed_runtime().package == "onnxruntime-training"


@pytest.mark.parametrize("name", differentiable())
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    case = small_case(name)
    assert case is not None, "no sample has a gradient"
    if name in NOT_CHECKED:
        with pytest.raises(Exception, match=r"Jacobian mismatch|Sparse output"):
            check_gradients(case, lambda function: function)
        pytest.skip(NOT_CHECKED[name])
    in_sessions = check_gradients(case, partial(torch.compile, **PLACED) if name in CHOSEN else None)
    assert bool(in_sessions) == (name not in IN_TORCH)
    _assert_checked({f"aten.{one}" for one in CHECKED_BY.get(name, "").split()}, in_sessions)


@pytest.mark.parametrize("written", WRITTEN, ids=lambda one: one.overloads.split()[0])
def test_gradients_of_a_function_that_the_database_lacks(written: Written) -> None:
    _assert_checked(written.names, check_gradients(written.case()))


@pytest.mark.slow
@pytest.mark.parametrize("name", differentiable())
def test_gradients_of_all_samples_that_differ_in_operators(name: str) -> None:
    different: dict[frozenset[str], Case] = {}
    for case in cases_of(name):
        before = different.setdefault(case.overloads, case)
        if sum(case.elements) < sum(before.elements):
            different[case.overloads] = case
    for case in different.values():
        if name not in NOT_CHECKED:
            check_gradients(case)


def _assert_checked(expected: set[str] | frozenset[str], in_sessions: set[str]) -> None:
    """Check that ONNX Runtime ran all lowerings; the training build, which is older, lacks kernels for some."""
    refused = {reason.split(": ")[0] for reason in counters["ort_train_eager"]} if IS_TRAINING_BUILD else set()
    assert not expected - in_sessions - refused, "the sample does not run these lowerings"


# -- completeness ------------------------------------------------------------------------------------------------------


@cache
def _formulas() -> dict[str, list[str]]:
    """Overload -> torch's formulas for its derivatives, as text."""
    path = Path(torchgen.__file__).parent / "packaged" / "autograd" / "derivatives.yaml"
    found = {}
    for entry in yaml.safe_load(path.read_text()):
        name = entry.pop("name").partition("(")[0]
        for other in ("result", "output_differentiability"):  # the formula of forward mode, and which results have one
            entry.pop(other, None)
        found[f"aten.{name}" if "." in name else f"aten.{name}.default"] = entry
    return {name: [str(text) for text in _texts(entry)] for name, entry in found.items()}


def _texts(entry: Any) -> list[Any]:
    return [one for value in entry.values() for one in _texts(value)] if isinstance(entry, dict) else [entry]


def has_derivative(overload: str) -> bool:
    """Check whether torch has a formula for the gradient of an overload, or it is itself a gradient's.

    torch makes the formula of a copy of a view, and of a function without writes, from that of the original.
    """
    original = re.sub(r"_(copy|functional)\.", ".", overload)
    formulas = _formulas().get(overload, _formulas().get(original, []))
    given = [text for text in formulas if text != "non_differentiable" and "not_implemented" not in text]
    return "_backward" in overload or bool(given)


def test_every_lowering_with_a_derivative_is_checked() -> None:
    by_samples = {f"aten.{one}" for overloads in CHECKED_BY.values() for one in overloads.split()}
    checked = by_samples.union(*(written.names for written in WRITTEN))
    ours = {str(overload) for overload in registered() - eager_only().keys()}
    assert {one for one in ours if has_derivative(one)} - checked - EXCLUDED.keys() == set()
    assert not EXCLUDED.keys() & checked
    assert not CHECKED_BY.keys() & NOT_CHECKED.keys()


def test_every_operator_that_is_listed_exists() -> None:
    assert {*NOT_CHECKED, *IN_TORCH} <= set(differentiable())
    assert CHECKED_BY.keys() <= operators().keys()


# -- operators that torch has on CUDA alone ----------------------------------------------------------------------------


def _run(overload: Any, arguments: Sequence[Any], results: Sequence[Tensor]) -> list[Tensor]:
    """Run one operator in ONNX Runtime on the CPU.

    Args:
        overload: the operator.
        arguments: its arguments.
        results: tensors like its first results, which are given.
    """
    graph, mode = Graph(), FakeTensorMode()
    given: list[Any] = []
    for index, value in enumerate(arguments):
        given.append(graph.placeholder(f"x{index}") if isinstance(value, Tensor) else value)
        if isinstance(value, Tensor):
            given[-1].meta["val"] = mode.from_tensor(value)
    call = graph.call_function(overload, tuple(given))
    call.meta["val"] = tuple(mode.from_tensor(one) for one in results)
    parts = [graph.call_function(operator.getitem, (call, index)) for index in range(len(results))]
    for part, fake in zip(parts, call.meta["val"], strict=True):
        part.meta["val"] = fake
    graph.output(tuple(parts))
    compilation = Compilation(parse_options(None, {"fallback": "error"}), torch.device("cpu"), 1, Listener())
    run = compilation.graph(GraphModule({}, graph), "inference", slice(None))
    return list(run([one.detach() for one in arguments if isinstance(one, Tensor)]))


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        result, scale = _run(aten._fused_rms_norm.default, (x, [4], weight, 1e-5), (x, x[:, :1].contiguous()))
        ctx.save_for_backward(x, scale, weight)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, scale, weight = ctx.saved_tensors
        arguments = (grad.contiguous(), x, [4], scale, weight, [True, True])
        return tuple(_run(aten._fused_rms_norm_backward.default, arguments, (x, weight)))


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        overload = aten._scaled_dot_product_flash_attention.default
        result, log_sums = _run(overload, (q, k, v, 0.0, True), (q, q[..., 0].contiguous()))
        ctx.save_for_backward(q, k, v, result, log_sums)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, result, log_sums = ctx.saved_tensors
        state = torch.zeros((), dtype=torch.int64)
        arguments = (grad.contiguous(), q, k, v, result, log_sums, None, None, 3, 3, 0.0, True, state, state)
        return tuple(_run(aten._scaled_dot_product_flash_attention_backward.default, arguments, (q, k, v)))


@pytest.mark.parametrize(("function", "shapes"), [(_RmsNorm, ((2, 4), (4,))), (_Flash, ((1, 1, 3, 2),) * 3)])
def test_gradients_of_an_operator_of_cuda(function: Any, shapes: Sequence[tuple[int, ...]]) -> None:
    inputs = tuple(torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    assert gradcheck(function.apply, inputs, fast_mode=True)
