"""Faults that no operator shows alone, and differences that are no fault."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ort_dynamo
from ort_dynamo.errors import InvalidArgumentError
from ort_dynamo.verification.record import Recorder

aten = torch.ops.aten


class Experts(nn.Module):
    """A mixture whose fresh router scores all experts alike."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(8, 4), nn.Parameter(torch.randn(4, 8, 8))
        nn.init.zeros_(self.router.weight)
        nn.init.zeros_(self.router.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        index = self.router(x).argmax(-1)
        return torch.einsum("nd,nde->ne", x, self.experts[index])


def last_of_equals(ctx: Any, x: ir.Value, dim: int, keepdim: bool = False) -> Any:
    """Choose the last of equal elements, where torch's kernel chooses the first."""
    return ctx.op.ArgMax(x, axis=dim, keepdims=int(keepdim), select_last_index=1)


def test_another_choice_of_equal_elements_is_no_fault(tmp_path: Path) -> None:
    ort_dynamo.register_lowering(aten.argmax.default, replace=True)(last_of_equals)
    result = ort_dynamo.verify(Experts(), torch.randn(6, 8), folder=tmp_path)
    assert result.ok
    assert result.differences
    assert result.fault is None
    assert [(one.operator, one.graph) for one in result.choices] == [("aten.argmax.default", "forward")]
    assert "self.router(x).argmax(-1)" in str(result)
    assert not list(tmp_path.iterdir())
    result.raise_if_wrong()


def test_a_call_with_another_choice_of_equal_elements_runs() -> None:
    ort_dynamo.register_lowering(aten.argmax.default, replace=True)(last_of_equals)
    compiled = torch.compile(Experts(), backend="ort_train", options={"verify": 1})
    compiled(torch.randn(6, 8)).sum().backward()


def test_a_wrong_operator_beside_equal_elements_is_named(tmp_path: Path) -> None:
    ort_dynamo.register_lowering(aten.argmax.default, replace=True)(last_of_equals)
    ort_dynamo.register_lowering(aten.tanh.default, replace=True)(lambda ctx, x: ctx.op.Mul(ctx.op.Tanh(x), 1.01))
    result = ort_dynamo.verify(nn.Sequential(Experts(), nn.Tanh()), torch.randn(6, 8), folder=tmp_path)
    assert not result.ok
    assert result.fault is not None
    assert result.fault.operator == "aten.tanh.default"


def slightly_wrong_silu(ctx: Any, x: ir.Value) -> ir.Value:
    return ctx.op.Mul(ctx.op.Mul(x, ctx.op.Sigmoid(x)), 1.00002)


def test_a_lowering_that_is_wrong_by_less_than_the_tolerance_is_named(tmp_path: Path) -> None:
    ort_dynamo.register_lowering(aten.silu.default, replace=True)(slightly_wrong_silu)
    layers = [nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 16)) for _ in range(12)]
    result = ort_dynamo.verify(nn.Sequential(*layers), torch.randn(8, 16), folder=tmp_path)
    assert result.fault is not None
    assert result.fault.operator == "aten.silu.default"
    assert "slightly_wrong_silu, which your program registered" in result.fault.cause


@dataclass(frozen=True)
class SaysNothing(ir.passes.InPlacePass):
    """Changes a model, and says that it does not."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        for node in model.graph:
            if node.op_type == "Tanh":
                node.op_type = "Sin"
        return ir.passes.PassResult(model, modified=False)


def test_a_pass_that_says_that_it_changes_nothing_is_named(tmp_path: Path) -> None:
    ort_dynamo.register_pass(SaysNothing())
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    result = ort_dynamo.verify(model, torch.randn(16, 8), folder=tmp_path)
    assert result.fault is not None
    assert "SaysNothing()" in result.fault.cause


class Trainer:
    """Keeps its networks and optimizers in dicts."""

    def __init__(self) -> None:
        net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        self.nets, self.optimizers = {"g": net}, {"g": torch.optim.SGD(net.parameters(), lr=0.1)}

    def step(self, x: torch.Tensor) -> torch.Tensor:
        self.optimizers["g"].zero_grad()
        loss = self.nets["g"](x).pow(2).mean()
        loss.backward()
        self.optimizers["g"].step()
        return loss.detach()


@pytest.mark.parametrize("tool", ["verify", "explain", "memory_plan"])
def test_a_trainer_with_networks_in_dicts_is_looked_into(tool: str, tmp_path: Path) -> None:
    ort_dynamo.register_lowering(aten.tanh.default, replace=True)(lambda ctx, x: ctx.op.Mul(ctx.op.Tanh(x), 1.1))
    trainer = Trainer()
    before = {name: one.clone() for name, one in trainer.nets["g"].state_dict().items()}
    more = {"folder": tmp_path} if tool == "verify" else {}
    result = getattr(ort_dynamo, tool)(trainer.step, torch.randn(4, 8), **more)
    assert all(torch.equal(one, before[name]) for name, one in trainer.nets["g"].state_dict().items())
    assert all(one.grad is None for one in trainer.nets["g"].parameters())
    if tool == "verify":
        assert result.fault.operator == "aten.tanh.default"


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, self.first(x), use_reentrant=True).sum()


def test_a_reentrant_checkpoint_is_compared() -> None:
    model = Checkpointed()
    result = ort_dynamo.verify(model, torch.randn(4, 8))
    assert result.ok
    assert result.compared > len(list(model.parameters()))
    assert all(one.grad is None for one in model.parameters())


def test_a_lazy_module_gets_its_shapes_for_good() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.ReLU())
    assert ort_dynamo.verify(model, torch.randn(2, 3)).ok
    assert type(model[0]) is nn.Linear
    assert model(torch.randn(2, 3)).shape == (2, 4)


def test_another_choice_hides_no_fault_of_the_graph_around(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a result of torch's part of the graph another value, beside an operator that chooses otherwise."""
    ort_dynamo.register_lowering(aten.argmax.default, replace=True)(last_of_equals)

    def two(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.sin(), torch.zeros_like(x).argmax(-1)

    assert ort_dynamo.verify(two, torch.randn(3, 4), folder=tmp_path).ok
    finished = Recorder.finished

    def spoilt(self: Recorder, graph: Any, run: Any) -> Any:
        def changed(given: list[Any]) -> Any:
            first, *others = run(given)
            return [first + 0.5, *others]

        changed._boxed_call = True  # type: ignore[attr-defined]
        return finished(self, graph, changed)

    monkeypatch.setattr(Recorder, "finished", spoilt)
    torch._dynamo.reset()
    result = ort_dynamo.verify(two, torch.randn(3, 4), folder=tmp_path)
    assert not result.ok
    assert result.fault is not None
    assert result.fault.culprit == "outside"


def test_a_step_that_does_not_repeat_itself_is_refused() -> None:
    generator = np.random.default_rng(0)

    def step(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return (x * generator.random()).tanh()

    with pytest.raises(InvalidArgumentError, match="two runs of it in eager mode differ"):
        ort_dynamo.verify(step, torch.randn(4))


def test_a_lazy_module_that_is_compiled_in_place_stays_compiled() -> None:
    model = nn.LazyLinear(4)
    model.compile(backend="ort_train")
    compiled = model._compiled_call_impl
    assert compiled is not None
    assert ort_dynamo.verify(model, torch.randn(2, 3)).ok
    assert model._compiled_call_impl is compiled


def test_another_choice_hides_no_trace_that_differs(tmp_path: Path) -> None:
    ort_dynamo.register_lowering(aten.argmax.default, replace=True)(last_of_equals)

    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = 1.5 if torch.compiler.is_compiling() else 1.0
        return torch.zeros_like(x).argmax(-1), x * scale

    assert not ort_dynamo.verify(step, torch.randn(3, 4), folder=tmp_path).ok
