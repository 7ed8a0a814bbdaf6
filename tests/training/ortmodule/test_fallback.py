"""Tests of section 1.6 of ORTModule's reference: policies on a backend that falls back operator by operator."""

from __future__ import annotations

import copy
import itertools
import warnings
from typing import Any

import onnx
import pytest
import torch
from small_models import Dense, compiles
from test_inputs_and_outputs import OfPoint, Point, ToPoint
from torch import Tensor, nn

import ort_dynamo
from ort_dynamo import ORTModule
from ort_dynamo.embedding import RunWatch
from ort_dynamo.errors import RuntimeNotInstalledError
from ort_dynamo.training import ortmodule
from ort_dynamo.training.ortmodule import (
    ORTModuleDeviceException,
    ORTModuleFallbackException,
    ORTModuleInitException,
    ORTModuleIOError,
    ORTModuleONNXModelException,
    ORTModuleTorchModelException,
    register_graph_optimizer,
    wrapper,
)
from ort_dynamo.training.ortmodule._fallback import _FallbackPolicy, wrap_exception


class Complex(Dense):
    """Has an operator that ONNX Runtime cannot take."""

    def forward(self, input1: Tensor) -> Tensor:
        return super().forward(input1) + torch.fft.fft(input1).real.sum()


def test_the_family_and_the_policies_have_their_names_and_numbers() -> None:
    assert [(policy.name, policy.value) for policy in _FallbackPolicy] == [
        ("FALLBACK_DISABLE", 1),
        ("FALLBACK_FORCE_TORCH_FORWARD", 2),
        ("FALLBACK_FORCE_TORCH_BACKWARD", 4),
        ("FALLBACK_UNSUPPORTED_DEVICE", 8),
        ("FALLBACK_UNSUPPORTED_DATA", 16),
        ("FALLBACK_UNSUPPORTED_TORCH_MODEL", 32),
        ("FALLBACK_UNSUPPORTED_ONNX_MODEL", 64),
        ("FALLBACK_BAD_INITIALIZATION", 128),
    ]
    assert ortmodule.ORTMODULE_FALLBACK_POLICY.value == 8 | 16 | 32 | 64
    for kind in (ORTModuleDeviceException, ORTModuleIOError, ORTModuleInitException, ORTModuleTorchModelException):
        assert issubclass(kind, ORTModuleFallbackException)
    cause = ValueError("what happened")
    wrapped = wrap_exception(ORTModuleIOError, cause)
    assert str(wrapped) == "what happened"
    assert wrapped.__cause__ is cause


@pytest.mark.parametrize(("policy", "retry"), list(itertools.product(["16", "FORCE"], [False, True])))
def test_data_of_another_type_runs_in_pytorch(policy: str, retry: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "FALLBACK_UNSUPPORTED_DATA" if policy == "16" else "FALLBACK_FORCE_TORCH_FORWARD"
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", name)
    monkeypatch.setenv("ORTMODULE_FALLBACK_RETRY", str(retry))
    x = torch.randn(3)
    ort_model = ORTModule(OfPoint())
    said = 0
    for _ in range(3):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert torch.equal(ort_model(Point(x, x)), x * x)
        texts = [str(one.message) for one in caught]
        assert all("Fallback to PyTorch due to exception" in text and "ORTModuleIOError" in text for text in texts)
        said += len(texts)
    assert said == (3 if retry else 1)


def test_a_result_of_another_type_is_pytorchs_with_pytorchs_side_effects() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Any:
            return Point(self.norm(x), torch.nn.functional.dropout(x))

    model = Counting()
    ort_model = ORTModule(copy.deepcopy(model))
    x = torch.randn(3, 4)
    for seed in range(2):
        torch.manual_seed(seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = ort_model(x)
        torch.manual_seed(seed)
        expected = model(x)
        assert torch.equal(found.x, expected.x)
        assert torch.equal(found.y, expected.y)
    assert ort_model.norm.num_batches_tracked == 2
    torch.testing.assert_close(ort_model.norm.running_mean, model.norm.running_mean, rtol=0, atol=0)


@pytest.mark.parametrize("retry", ["0", "1"])
def test_a_later_result_of_another_type_has_side_effects_once(retry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class SometimesPoint(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.calls = 0

        def forward(self, x: Tensor) -> Any:
            self.calls += 1
            y = torch.nn.functional.dropout(self.norm(x))
            return Point(y, y) if x.shape[0] == 3 else y

    monkeypatch.setenv("ORTMODULE_FALLBACK_RETRY", retry)
    model = SometimesPoint()
    ort_model = ORTModule(copy.deepcopy(model))
    inputs = [torch.randn(size, 4) for size in (6, 3, 5, 3)]
    found, said = [], 0
    for module in (model, ort_model):
        torch.manual_seed(3)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            outputs = [module(x) for x in inputs]
        found.append([one.x if isinstance(one, Point) else one for one in outputs])
        said += sum("ORTModuleIOError" in str(one.message) for one in caught)
    for expected, actual in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected)
    assert said >= 1
    assert ort_model.norm.num_batches_tracked == ort_model.calls == 4
    torch.testing.assert_close(ort_model.norm.running_mean, model.norm.running_mean)


class Pieces(nn.Module):
    """Changes buffers and draws random numbers before a graph break."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.fc = nn.Linear(4, 2)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.nn.functional.dropout(self.norm(x))
        self.count = self.count + 1
        torch._dynamo.graph_break()
        return self.fc(y)


@pytest.mark.parametrize("sizes", [(3, 3, 5), (3, 5, 6), (3, 3, 5, 6)])
def test_a_piece_that_does_not_compile_has_no_side_effects_of_pieces_before_it(sizes: tuple[int, ...]) -> None:
    fails_at_once = sizes == (3, 3, 5)
    kind = type(f"Pieces{'_'.join(map(str, sizes))}", (Pieces,), {})

    @register_graph_optimizer(target_modules=kind.__name__)
    def refuse(graph: onnx.GraphProto) -> None:
        has_symbols = any(size.dim_param for one in graph.input for size in one.type.tensor_type.shape.dim)
        if any(node.op_type == "Gemm" for node in graph.node) and (fails_at_once or has_symbols):
            raise NotImplementedError("no Gemm")

    model = kind()
    ort_model = ORTModule(copy.deepcopy(model))
    inputs = [torch.randn(size, 4) for size in sizes]
    found, said = [], 0
    for module in (model, ort_model):
        torch.manual_seed(3)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found.append([module(x) for x in inputs])
        said += sum("no Gemm" in str(one.message) for one in caught)
    for expected, actual in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected)
    assert said == 1
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(ort_model.get_buffer(name), buffer)


def test_without_a_matching_policy_the_exception_is_raised_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_UNSUPPORTED_DEVICE|FALLBACK_UNSUPPORTED_ONNX_MODEL")
    ort_model = ORTModule(ToPoint())
    for _ in range(2):
        with pytest.raises(ORTModuleIOError, match="data type"):
            ort_model(torch.randn(3))


def test_by_default_an_operator_runs_in_eager_alone() -> None:
    ort_model = ORTModule(Complex())
    x = torch.randn(3, 8)
    torch.testing.assert_close(ort_model(x), ort_model.module(x))
    seen = ort_dynamo.summary()
    assert seen.eager_nodes > 0
    assert seen.native.total() > 0


@pytest.mark.parametrize("policy", ["FALLBACK_DISABLE", "FALLBACK_UNSUPPORTED_DATA"])
def test_without_the_policy_an_operator_is_refused(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", policy)
    ort_model = ORTModule(Complex())
    with pytest.raises(
        ORTModuleONNXModelException, match="There was an error while exporting the PyTorch model to ONNX"
    ) as raised:
        ort_model(torch.randn(3, 8))
    assert "ORTMODULE_FALLBACK_POLICY=FALLBACK_UNSUPPORTED_ONNX_MODEL" in str(raised.value)
    assert "options=" not in str(raised.value)
    assert ort_dynamo.summary().eager_nodes == 0 or not compiles()


def test_disabled_a_module_that_dynamo_leaves_to_eager_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Untraced(Dense):
        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def forward(self, input1: Tensor) -> Tensor:
            return super().forward(input1)

    x = torch.randn(3, 8)
    torch.testing.assert_close((allowed := ORTModule(Untraced()))(x), allowed.module(x))
    torch._dynamo.reset()
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_DISABLE")
    with pytest.raises(ORTModuleTorchModelException, match="Untraced runs in eager"):
        ORTModule(Untraced())(x)


def test_an_error_of_the_programs_own_is_its_own() -> None:
    class Failing(Dense):
        def forward(self, input1: Tensor) -> Tensor:
            if input1.shape[0] == 5:
                raise ValueError("five rows")
            return super().forward(input1)

    ort_model = ORTModule(Failing())
    with pytest.raises(Exception, match=r"fake tensor|mat1 and mat2"):
        ort_model(torch.randn(3, 7))
    with pytest.raises(ValueError, match="five rows"):
        ort_model(torch.randn(5, 8))
    assert ort_model(torch.randn(3, 8)).shape == (3, 4)


@pytest.mark.parametrize("kind", [ValueError, StopIteration, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("in_pieces", [False, True], ids=["one graph", "two pieces"])
def test_a_call_after_an_error_of_the_programs_runs_in_sessions(in_pieces: bool, kind: type[BaseException]) -> None:
    class Failing(Dense):
        def forward(self, input1: Tensor, fails: bool = False) -> Tensor:
            hidden = self.fc1(input1)
            if in_pieces:
                torch._dynamo.graph_break()
            if fails:
                raise kind("as asked")
            return self.fc2(hidden)

    ort_model = ORTModule(Failing())
    for rows in (3, 4):
        x = torch.randn(rows, 8)
        with pytest.raises(kind, match="as asked"):
            ort_model(x, True)
        before = compiles()
        torch.testing.assert_close(ort_model(x), ort_model.module(x))
        assert compiles() > before


@pytest.mark.parametrize("shows_cause", [False, True])
def test_a_function_whose_error_became_another_one_runs_in_sessions_again(shows_cause: bool) -> None:
    class Failing(Dense):
        def piece(self, hidden: Tensor, fails: bool) -> Tensor:
            torch._dynamo.graph_break()
            if fails:
                raise ValueError("as asked")
            return self.fc2(hidden)

        def forward(self, input1: Tensor, fails: bool = False) -> Tensor:
            hidden = self.fc1(input1)
            try:
                return self.piece(hidden, fails)
            except ValueError as error:
                raise KeyError("another") from (error if shows_cause else None)

    ort_model = ORTModule(Failing())
    x = torch.randn(3, 8)
    for _ in range(2):
        with pytest.raises(KeyError, match="another"):
            ort_model(x, True)
        with RunWatch() as watch:
            torch.testing.assert_close(ort_model(x), ort_model.module(x))
        assert watch.seen


def test_a_function_that_is_disabled_stays_so_after_an_error() -> None:
    class Failing(Dense):
        @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
        def forward(self, input1: Tensor, fails: bool = False) -> Tensor:
            if fails:
                raise ValueError("as asked")
            calls.append(torch.compiler.is_compiling())
            return super().forward(input1)

    calls: list[bool] = []
    ort_model = ORTModule(Failing())
    x = torch.randn(3, 8)
    ort_model(x)
    with pytest.raises(ValueError, match="as asked"):
        ort_model(x, True)
    ort_model(x)
    assert calls == [False, False]


def test_tensors_on_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_DISABLE")
    ort_model = ORTModule(Dense())
    ort_model(torch.randn(3, 8))
    message = "Input argument to forward found on device meta, but expected it to be on module device cpu."
    for _ in range(2):
        with pytest.raises(ORTModuleDeviceException) as raised:
            ort_model(torch.randn(3, 8, device="meta"))
        assert str(raised.value) == message
    assert ort_model(torch.randn(3, 8)).shape == (3, 4)


def test_a_module_on_two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Dense()
    model.fc2.to("meta")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ORTModule(model)  # by default it runs in PyTorch and warns at the first call
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_UNSUPPORTED_DATA")
    with pytest.raises(ORTModuleDeviceException) as raised:
        ORTModule(model)
    assert str(raised.value) == "ORTModule supports a single device per model"


@pytest.mark.parametrize("retry", ["0", "1"])
def test_a_data_parallel_module(retry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.DataParallel(Dense())
    monkeypatch.setenv("ORTMODULE_FALLBACK_RETRY", retry)
    ort_model = ORTModule(model)
    x = torch.randn(3, 8)
    with pytest.warns(UserWarning, match="not compatible with torch.nn.DataParallel"):
        assert torch.equal(ort_model(x), model(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no retry will help
        assert torch.equal(ort_model(x), model(x))
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_DISABLE")
    with pytest.raises(ORTModuleTorchModelException, match=r"ORTModule is not compatible with torch.nn.DataParallel"):
        ORTModule(model)


def test_without_onnx_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing_installed() -> None:
        raise RuntimeNotInstalledError

    monkeypatch.setattr(wrapper, "installed_runtime", nothing_installed)
    with pytest.raises(ORTModuleInitException, match="no distribution of it is installed"):
        ORTModule(Dense())
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_BAD_INITIALIZATION")
    x = torch.randn(3, 8)
    ort_model = ORTModule(Dense())
    with pytest.warns(UserWarning, match="ORTModuleInitException"):
        assert torch.equal(ort_model(x), ort_model.module(x))


def test_constants_of_the_package_are_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ortmodule, "ORTMODULE_FALLBACK_POLICY", _FallbackPolicy.FALLBACK_DISABLE)
    monkeypatch.setattr(ortmodule, "ORTMODULE_FALLBACK_RETRY", True)
    with pytest.raises(ORTModuleIOError):
        ORTModule(OfPoint())(Point(torch.ones(1), torch.ones(1)))
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_UNSUPPORTED_DATA")
    with pytest.warns(UserWarning, match="Fallback to PyTorch"):
        ORTModule(OfPoint())(Point(torch.ones(1), torch.ones(1)))
