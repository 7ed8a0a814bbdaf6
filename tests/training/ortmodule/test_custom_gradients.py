"""Section 1.7 of ORTModule's reference: gradients that a program defines by nodes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_models import pair
from torch import Tensor, nn

from ort_dynamo import ORTModule
from ort_dynamo.training.ortmodule import ORTModuleONNXModelException
from ort_dynamo.training.ortmodule._custom_gradient_registry import register_gradient


class OfCos(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cos(x) * self.weight


def twice_the_gradient() -> list[Any]:
    return [
        ("Constant", [], ["minus_two"], {"value": {"value": -2.0, "dtype": "IElemType(0)", "is_tensor": True}}),
        ("Sin", ["I(0)"], ["sine"]),
        ("Mul", ["sine", "GO(0)"], ["product"]),
        ("Mul", ["product", "minus_two"], ["GI(0)"]),
    ]


@pytest.mark.parametrize("named", [("", "Cos"), ("org.pytorch.aten", "ATen", "cos", "")])
def test_a_gradient_can_be_defined_by_nodes(named: tuple[str, ...]) -> None:
    register_gradient(*named)(twice_the_gradient)
    ort_model, model = pair(OfCos())
    found = []
    for one in (ort_model, model):
        x = torch.linspace(-1, 1, 4).requires_grad_()
        out = one(x)
        out.sum().backward()
        found.append((out.detach(), x.grad, one.get_parameter("weight").grad))
    (mine, my_gradient, my_weights), (theirs, their_gradient, their_weights) = found
    torch.testing.assert_close(mine, theirs)
    torch.testing.assert_close(my_gradient, their_gradient * 2)
    torch.testing.assert_close(my_weights, their_weights)
    x = torch.linspace(-1, 1, 4).requires_grad_()
    torch.compile(torch.cos, backend="ort_train")(x).sum().backward()
    torch.testing.assert_close(x.grad, -x.detach().sin())  # of ORTModules alone


def test_gradients_that_cannot_be_defined_are_refused() -> None:
    with pytest.raises(ValueError, match="torch has no operator ONNX::NoSuch"):
        register_gradient("", "NoSuch")
    with pytest.raises(ValueError, match=r"torch has no operator com.microsoft::Gelu"):
        register_gradient("com.microsoft", "Gelu")
    with pytest.raises(ValueError, match=r"define it by torch.library"):
        register_gradient("", "Sin")(lambda: [(("ATen", "org.pytorch.aten"), ["GO(0)"], ["GI(0)"])])


def test_a_gradient_that_reads_nothing_known_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_DISABLE")
    register_gradient("", "Cos")(lambda: [("Neg", ["nothing"], ["GI(0)"])])
    with pytest.raises(ORTModuleONNXModelException, match="reads 'nothing', which no node computes"):
        ORTModule(OfCos())(torch.randn(4, requires_grad=True))
