"""Private names of torch are used in one package only, and names that a version lacks have substitutes."""

from __future__ import annotations

import ast
import dataclasses
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch

from ort_dynamo.errors import UnsupportedNodeError
from ort_dynamo.lowering import torchlib
from ort_dynamo.targets.target import OPSET
from ort_dynamo.torch_internals import dlpack, lookup, versions
from ort_dynamo.torch_internals.kernels import decompositions, dispatcher, promotion
from ort_dynamo.torch_internals.kernels.operators import aten, custom_name
from ort_dynamo.torch_internals.release import release, say_if_newer
from ort_dynamo.torch_internals.tracing import exporter
from ort_dynamo.torch_internals.tracing.exporter import ExporterMissingError

_ATTRIBUTES = {
    *("_schema", "_can_decompose", "_qualname", "py_kernels", "_dispatch_cache", "_cdata", "_dynamo_source"),
    *("impl_aten", "_overload_names", "_opname", "_defined_in_python", "_nn_module_stack"),
    "_create_act_recv_info",
}
"""Private attributes of torch's objects, which no lint rule sees."""

_WITHOUT = """
import json
from ort_dynamo.torch_internals import lookup
def find(path):
    raise ImportError(path)
lookup._find = find
"""

_TRAIN = """
import torch
from torch import nn
from ort_dynamo.testing import assert_like_eager
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 5)
    def forward(self, x):
        x = nn.functional.interpolate(self.norm(self.conv(x)).relu(), scale_factor=2.0, mode="bilinear")
        return self.out(nn.functional.dropout(x, 0.3).mean((2, 3))).softmax(-1)
assert_like_eager(Net(), torch.randn(2, 3, 8, 8), allow_eager=True)
x = torch.randn(4, 6, requires_grad=True)
assert_like_eager(lambda x: x[:, 1:] * x.shape[0], x, dynamic=True, allow_eager=True)
from ort_dynamo.torch_internals.tracing.dynamo import counters
print(json.dumps([lookup.missing(), counters["ort_train"]["native_nodes"]]))
"""


def test_private_attributes_of_torchs_objects_are_read_behind_the_door(trees: dict[Path, ast.Module]) -> None:
    found = {
        f"{path.parent.name}/{path.name}:{node.lineno} {node.attr}"
        for path, tree in trees.items()
        if "torch_internals" not in (*path.parts, path.stem)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in _ATTRIBUTES
    }
    assert found == set()


def test_a_model_trains_where_torch_lacks_all_that_is_asked_for(with_everything_imported: Any) -> None:
    missing, native = json.loads(with_everything_imported(_WITHOUT, _TRAIN).splitlines()[-1])
    assert {"torch._C:_to_dlpack", "torch._prims", "torch._decomp:core_aten_decompositions"} <= set(missing)
    assert native > 0


def test_the_installed_torch_has_all_that_is_asked_for(with_everything_imported: Any) -> None:
    if release(torch.__version__) > release(versions.TESTED[1]):
        pytest.skip(f"torch {torch.__version__} is newer than any tested")
    after = "from ort_dynamo.torch_internals.lookup import missing\nprint(*missing())"
    assert with_everything_imported("", after).split() == []


def test_a_missing_name_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "_missing", set())
    assert lookup.private("torch._C:_no_such_name", 7) == 7
    assert lookup.private("torch._no_such_module:name") is None
    assert lookup.private("torch._C:_to_dlpack") is not None
    assert lookup.missing() == ("torch._C:_no_such_name", "torch._no_such_module:name")


# -- DLPack ----------------------------------------------------------------------------------------------------------


def _two_arguments(tensor: torch.Tensor, version: int) -> Any:
    raise AssertionError("never reached: it takes another argument")


def _other_capsule(tensor: torch.Tensor) -> Any:
    return "no capsule"


@pytest.mark.parametrize("changed", [None, _two_arguments, _other_capsule])
def test_dlpack_calls_that_changed_give_way_to_the_public_ones(
    changed: Callable[..., Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = lookup._find
    monkeypatch.setattr(lookup, "_missing", set())

    def changed_find(path: str) -> Any:
        if path != "torch._C:_to_dlpack":
            return find(path)
        if changed is None:
            raise AttributeError(path)
        return changed

    monkeypatch.setattr(lookup, "_find", changed_find)
    to, back = dlpack._choose()
    assert to is not changed
    for tensor in (torch.arange(6.0).view(2, 3), torch.tensor([True, False]), torch.ones(2, requires_grad=True)):
        shared = back(to(tensor))
        assert shared.data_ptr() == tensor.data_ptr()
        assert shared.dtype is tensor.dtype
        assert shared.shape == tensor.shape


def test_the_plain_dlpack_calls_are_taken_where_they_work() -> None:
    assert dlpack.to_dlpack is lookup.private("torch._C:_to_dlpack")
    assert dlpack.from_dlpack is lookup.private("torch._C:_from_dlpack")


# -- the exporter ----------------------------------------------------------------------------------------------------


@pytest.fixture
def no_recorder(monkeypatch: pytest.MonkeyPatch) -> Any:
    def changed(path: str) -> Any:
        raise ImportError(path)

    monkeypatch.setattr(lookup, "_missing", set())
    monkeypatch.setattr(lookup, "_find", changed)
    exporter._try.cache_clear()
    torchlib._find_function.cache_clear()
    yield
    exporter._try.cache_clear()
    torchlib._find_function.cache_clear()


@pytest.mark.usefixtures("no_recorder")
def test_torch_lib_is_not_used_without_its_recorder() -> None:
    node = torch.fx.Graph().call_function(aten.heaviside.default)
    with pytest.raises(ExporterMissingError, match="no recorder of operators"):
        exporter.find_exporter(OPSET)
    assert not torchlib.has_function(torch.ops.aten.relu.default)

    class Context:
        def __init__(self) -> None:
            self.node = node

    with pytest.raises(UnsupportedNodeError, match="torch_lib cannot be loaded: ImportError: torch's ONNX exporter"):
        torchlib.call(Context(), (), {})  # type: ignore[arg-type]


def test_an_exporter_whose_parts_take_other_arguments_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    found = exporter._find()

    def stand_in(opset: Any, value: ir.Value) -> ir.Value:
        raise TypeError("SymbolicTensor() takes 2 arguments")

    changed = dataclasses.replace(found, stand_in=stand_in)
    monkeypatch.setattr(exporter, "_find", lambda: changed)
    assert exporter._try.__wrapped__(OPSET) == "TypeError: SymbolicTensor() takes 2 arguments"


# -- substitutes agree with torch's own functions ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("output_size", "factors"), [([5, 7], None), (None, [2.0, 1.5]), (None, [0.5, 2.0]), (None, [1.3, 0.7])]
)
def test_lengths_of_a_resize(output_size: Any, factors: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = torch.Size((2, 3, 9, 11))
    own = list(decompositions.resized_lengths(shape, output_size, factors))
    monkeypatch.setattr(decompositions, "_resized_lengths", None)
    assert list(decompositions.resized_lengths(shape, output_size, factors)) == own


@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 4, 5), (2, 1, 4, 5), (2, 3, 1, 1), (2, 3, 4, 5, 6)])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("sliced", [False, True])
def test_memory_format_of_a_tensor(
    shape: tuple[int, ...], last: bool, sliced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = torch.zeros(shape)
    if last and len(shape) >= 4:
        tensor = tensor.to(memory_format=torch.channels_last if len(shape) == 4 else torch.channels_last_3d)
    tensor = tensor[..., ::2] if sliced else tensor
    own = promotion.memory_format_of(tensor)
    monkeypatch.setattr(promotion, "_suggest_memory_format", None)
    assert promotion.memory_format_of(tensor) is own


def test_an_operator_without_python_kernels_has_nothing_to_replace() -> None:
    class Bare:
        pass

    assert dispatcher.python_kernels(Bare()) == {}  # type: ignore[arg-type]
    dispatcher.forget_dispatch(Bare())  # type: ignore[arg-type]


def test_only_custom_operators_have_a_custom_name() -> None:
    @torch.library.custom_op("door_test::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    assert custom_name(twice) == "door_test.twice"
    assert custom_name(torch.relu) is None


# -- versions ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["2.16.0", "3.0.0a0+git123", "2.20"])
def test_a_newer_torch_runs_and_is_said_once(version: str, caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    versions.say_if_untested.cache_clear()
    with caplog.at_level(logging.INFO, logger="ort_dynamo"):
        versions.say_if_untested()
        versions.say_if_untested()
    monkeypatch.undo()
    versions.say_if_untested.cache_clear()
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert record.getMessage() == f"torch {version} is newer than 2.15, the newest that ort_dynamo was tested with"


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.15.1"])
def test_of_a_tested_torch_nothing_is_said(version: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="ort_dynamo"):
        say_if_newer(logging.getLogger("ort_dynamo"), "torch", version, versions.TESTED[1])
    assert not caplog.records
