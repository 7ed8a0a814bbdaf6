"""Operators that the installed torch lacks are known, and nothing fails for them."""

from __future__ import annotations

import json
import random
from typing import Any

import onnx_ir as ir
import pytest
import torch

from ort_dynamo.capture.decompositions import table
from ort_dynamo.lowering import registry
from ort_dynamo.torch_internals.kernels import operators
from ort_dynamo.torch_internals.kernels.operators import (
    AbsentOperatorError,
    absent_operators,
    aten,
    higher_order,
    in_place_of,
    is_absent,
    namespace,
    present,
)
from ort_dynamo.torch_internals.release import release

_KNOWN_ABSENT: dict[tuple[int, int], set[str]] = {
    (2, 11): {"aten._foreach_clone", "aten._upsample_lanczos2d_aa", "aten._upsample_lanczos2d_aa_backward"},
    (2, 12): set(),
    (2, 13): set(),
    (2, 14): {"aten.cholesky"},
    (2, 15): {"aten.cholesky"},
}
"""Release of torch -> the operators named in the sources that it lacks; other releases have not been looked at."""

_HIDE = """
import json
from ort_dynamo.torch_internals.kernels import operators
hidden, look_up = set(json.loads({hidden!r})), operators._look_up
def looked_up(name, owner, attribute):
    if name in hidden or {everything} and name.count(".") and not attribute.startswith("__"):
        raise AttributeError(name)
    return look_up(name, owner, attribute)
operators._look_up = looked_up
"""

_TRAIN = """
import torch
from torch import nn
from ort_dynamo.testing import assert_like_eager
torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(36, 5),
                      nn.GELU(), nn.LayerNorm(5))
class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = model
    def forward(self, x, y):
        return nn.functional.cross_entropy(self.model(x), y)
assert_like_eager(WithLoss(), torch.randn(2, 3, 8, 8), torch.tensor([1, 3]), allow_eager=True)
from ort_dynamo.torch_internals.kernels.operators import absent_operators
from ort_dynamo.torch_internals.tracing.dynamo import counters
print(json.dumps([absent_operators(), sorted(map(str, registered())), counters["ort_train"]["graphs"]]))
"""


def test_a_name_is_torchs_own_overload() -> None:
    assert aten.mul.Tensor is torch.ops.aten.mul.Tensor
    assert not is_absent(aten.mul.Tensor)
    assert higher_order.cond is torch.ops.higher_order.cond


def test_a_packet_compares_and_hashes_as_torchs_own() -> None:
    own = torch.ops.aten.mul.Tensor.overloadpacket
    assert own == aten.mul
    assert own in (aten.add, aten.mul)
    assert own in {aten.mul}
    assert aten.mul in {own}
    assert own not in (aten.add, aten.div)
    assert aten.mul != aten.add
    assert torch.equal(aten.mul(torch.ones(2), 3.0), torch.full((2,), 3.0))
    assert set(aten.mul.overloads()) == set(own.overloads())


@pytest.mark.parametrize("name", ["no_such_operator", "no_such_operator.Tensor", "mul.no_such_overload"])
def test_an_absent_operator_is_remembered_and_equals_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "_absent", set())
    found: Any = namespace("aten")
    for part in name.split("."):
        found = getattr(found, part)
    assert is_absent(found)
    assert found not in {torch.ops.aten.mul.Tensor, torch.ops.aten.mul}
    assert absent_operators() == (f"aten.{name.removesuffix('.Tensor')}",)
    assert present({found: 1, aten.mul.Tensor: 2}) == {torch.ops.aten.mul.Tensor: 2}
    with pytest.raises(AbsentOperatorError, match=rf"torch {torch.__version__.split('+')[0]}.* has no operator aten"):
        found(torch.ones(1))


def test_attribute_lookups_leave_no_absent_operator() -> None:
    before = absent_operators()
    assert not hasattr(aten, "__wrapped__")
    assert not hasattr(aten.mul, "__wrapped__")
    assert absent_operators() == before
    assert aten.__lshift__.Tensor is torch.ops.aten.__lshift__.Tensor


def test_no_lowering_is_registered_for_an_absent_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "_absent", set())
    before, kept = registry.registered(), dict(registry.eager_only())

    @registry.lowering(aten.no_such_operator.default)
    def lower(ctx: Any, self: ir.Value) -> ir.Value:
        return self

    registry.keep_in_eager("a reason", aten.mul.no_such_overload)
    assert registry.registered() == before
    assert registry.eager_only() == kept


def test_a_decomposition_into_an_absent_operator_leaves_its_operator_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "_absent", set())
    formulas = table._left_whole({aten.relu.default: lambda x: aten.no_such_operator(x), aten.neg.default: torch.neg})
    assert formulas[torch.ops.aten.relu.default](torch.ones(1)) is NotImplemented
    assert formulas[torch.ops.aten.neg.default](torch.ones(1)) == -1


def test_the_absent_operators_of_the_installed_torch_are_the_known_ones(
    named_operators: list[str], with_everything_imported: Any
) -> None:
    known = _KNOWN_ABSENT.get(release(torch.__version__))
    if known is None:
        pytest.skip(f"the absent operators of torch {torch.__version__} are not recorded")
    reported = with_everything_imported(
        "",
        f"""
from ort_dynamo.torch_internals.kernels import operators
for name in {named_operators!r}:
    found = operators
    for part in name.split("."):
        found = getattr(found, part)
print(*operators.absent_operators())
""",
    )
    assert set(reported.split()) == known


def test_every_module_imports_where_torch_lacks_every_operator(
    named_operators: list[str], with_everything_imported: Any
) -> None:
    assert len(named_operators) > 500
    hide = _HIDE.format(hidden="[]", everything=True)
    assert with_everything_imported(hide, "print(registered())").strip() == "frozenset()"


@pytest.mark.parametrize("seed", [0, 1])
def test_a_model_trains_where_torch_lacks_operators(
    seed: int, named_operators: list[str], with_everything_imported: Any
) -> None:
    overloads = [name for name in named_operators if name.startswith("aten.") and name.count(".") == 2]
    overloads.remove("aten.reshape.default")  # every torch has it, and ReshapeViews writes it
    hidden = {"aten.relu.default", "aten.native_layer_norm", *random.Random(seed).sample(overloads, 10)}
    hide = _HIDE.format(hidden=json.dumps(sorted(hidden)), everything=False)
    absent, registered, graphs = json.loads(with_everything_imported(hide, _TRAIN).splitlines()[-1])
    assert graphs == 2
    known = _KNOWN_ABSENT.get(release(torch.__version__), set(absent) - hidden)
    assert set(absent) - known <= hidden
    assert "aten.relu.default" in absent
    assert "aten.relu.default" not in registered
    assert "aten.native_layer_norm" in absent
    assert "aten.native_layer_norm.default" not in registered
    assert len(registered) > 500


@pytest.mark.parametrize(
    ("overload", "written"),
    [
        (torch.ops.aten.relu.default, torch.ops.aten.relu_.default),
        (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor),
        (torch.ops.aten.where.self, None),
        (torch.ops.aten.__lshift__.Scalar, None),
        (torch.ops.aten.clone.default, None),
    ],
)
def test_the_in_place_form_of_an_operator_is_found(overload: Any, written: Any) -> None:
    assert in_place_of(overload) is written
