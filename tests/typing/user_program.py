"""A program of a user, which uses every public name: read by type checkers, never run.

mypy and pyright check it in their strict modes; `assert_type` fails where a name loses its type on the way out. pyright
does not know all types of torch itself, in two lines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, assert_type

import onnx
import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.passes.infra.pass_base import PassBase, PassResult
from torch.utils.hooks import RemovableHandle

import ort_dynamo
from ort_dynamo import (
    CollectedStatistics,
    DebugOptions,
    Explanation,
    IODescription,
    LogLevel,
    LoweringContext,
    MemoryPlan,
    ModelDescription,
    NodeProfile,
    ORTModule,
    ORTTrainer,
    ORTTrainerOptions,
    PropagateCastOpsStrategy,
    RunStatistics,
    StatisticsComparison,
    Summary,
    TrainStepInfo,
    ValueDifference,
    ValueStatistics,
    Verification,
    amp,
    optim,
    register_lowering,
    register_pass,
    testing,
)
from ort_dynamo.embedding import CompileRecord, Gaps, Options, count_places, find_gaps, make_options, parse_options
from ort_dynamo.errors import OrtDynamoError
from ort_dynamo.fx_testing import assert_fx_untouched, graph_text


def train(model: nn.Module, batch: Tensor) -> Summary:
    options: dict[str, Any] = {"memory_budget": 0.5, "propagate_cast_ops": {"strategy": PropagateCastOpsStrategy.NONE}}
    compiled = torch.compile(model, backend="ort_train", options=options)  # pyright: ignore[reportUnknownMemberType]
    compiled(batch).sum().backward()
    whole = ort_dynamo.require_compiled(model, whole="onnxruntime")
    assert_type(whole, nn.Module)
    found = ort_dynamo.summary()
    assert_type(found, Summary)
    assert_type(found.native, Counter[str])
    assert_type(found.eager_nodes, int)
    assert_type(ort_dynamo.__version__, str)
    return found


def look_inside(model: nn.Module, batch: Tensor) -> tuple[Explanation, MemoryPlan, Verification]:
    explanation = ort_dynamo.explain(model, batch, measure=True)
    assert_type(explanation, Explanation)
    assert_type(explanation.peak, int)
    assert_type(explanation.summary, Summary)
    plan = ort_dynamo.memory_plan(model, batch)
    assert_type(plan, MemoryPlan)
    for graph in plan.graphs:
        assert_type(len(graph.rows), int)
    verification = ort_dynamo.verify(model, batch)
    assert_type(verification, Verification)
    assert_type(verification.ok, bool)
    verification.raise_if_wrong()
    return explanation, plan, verification


def count_values(model: nn.Module, batch: Tensor, path: Path) -> StatisticsComparison:
    with ort_dynamo.collect_statistics(every=2, modules="layers.*") as collected:
        assert_type(collected, CollectedStatistics)
        model(batch)
        collected.next_step()
    assert_type(collected.step, int)
    collected.save(path)
    stored = ort_dynamo.load_statistics(path)
    assert_type(stored, RunStatistics)
    assert_type(stored.first_nan(), ValueStatistics | None)
    compared = ort_dynamo.compare_statistics(collected, stored, tolerance=1e-3)
    assert_type(compared, StatisticsComparison)
    for difference in compared.differences:
        assert_type(difference, ValueDifference)
        assert_type(difference.first, ValueStatistics)
    return compared


def profile(model: nn.Module, batch: Tensor) -> None:
    with ort_dynamo.profile_nodes() as nodes:
        assert_type(nodes, NodeProfile)
        with torch.profiler.profile() as profiler:
            model(batch)
    nodes.export_chrome_trace(profiler, "trace.json")


def wrap(model: nn.Module, batch: Tensor) -> ORTModule:
    wrapped = ORTModule(model, DebugOptions(log_level=LogLevel.INFO, save_onnx=False))
    module: nn.Module = wrapped
    assert_type(wrapped.module, nn.Module)
    assert_type(wrapped.training, bool)
    module.train()(batch).sum().backward()
    torch.optim.SGD(wrapped.parameters(), lr=0.1).step()  # pyright: ignore[reportUnknownMemberType]
    return wrapped


class HalfTheRate(optim.ConstantWarmupLRScheduler):
    def get_lr(self, train_step_info: TrainStepInfo) -> list[float]:
        return [train_step_info.optimizer_config.lr / 2]


def train_by_trainer(model: nn.Module, x: Tensor, y: Tensor, folder: Path) -> ORTTrainer:
    description = ModelDescription([IODescription("x", ["batch", 4])], [IODescription("loss", [])])
    given: dict[str, Any] = {"inputs": [("x", ["batch", 4]), ("y", ["batch"])], "outputs": [("loss", [], True)]}
    assert isinstance(description, ModelDescription)
    scaler: amp.LossScaler = amp.DynamicLossScaler()
    settings = ORTTrainerOptions(
        {"lr_scheduler": HalfTheRate(10), "mixed_precision": {"enabled": True, "loss_scaler": scaler}}
    )
    config = optim.AdamConfig(lr=1e-3)
    assert_type(config.lr, float)
    trainer = ORTTrainer(model, given, config, nn.CrossEntropyLoss(), settings)
    assert_type(trainer.options, ORTTrainerOptions)
    trainer.train_step(x, y)
    trainer.save_checkpoint(folder / "checkpoint")
    assert_type(trainer.state_dict(), dict[str, Any])
    trainer.save_as_onnx(folder / "model.onnx")
    graph = ort_dynamo.export_training_graph(model, given, optim.SGDConfig(lr=0.1), [x, y], part="gradients")
    assert_type(graph, onnx.ModelProto)
    return trainer


@dataclass(frozen=True)
class CountNodes(PassBase):
    name: str = "count"

    def call(self, graph_module: GraphModule) -> PassResult:
        return PassResult(graph_module, False)


class KeepModel(ir.passes.InPlacePass):
    def call(self, model: ir.Model) -> ir.passes.PassResult:
        return ir.passes.PassResult(model, modified=False)


def add_passes() -> None:
    handle = register_pass(CountNodes(), first=True)
    assert_type(handle, RemovableHandle)
    handle.remove()
    register_pass(KeepModel())
    text = graph_text(assert_fx_untouched(CountNodes(), "x: f32[2]\nreturn x"))
    assert_type(text, str)


@register_lowering(torch.ops.aten.sinc.default, replace=True)
def lower_sinc(ctx: LoweringContext, x: ir.Value) -> ir.Value:
    if ctx.rank(x) > 4:
        raise ctx.refuse("more than four dimensions")
    assert_type(ctx.dtype(x), torch.dtype)
    assert_type(ctx.fake(x), Tensor)
    scaled: ir.Value = ctx.op.Mul(x, ctx.constant(3.0, torch.float32))
    return ctx.cast(scaled, torch.float64)


def check(function: nn.Module, x: Tensor) -> dict[str, int]:
    testing.assert_like_eager(function, x, dynamic=True, tolerance=testing.Tolerance(1e-5, 1e-6))
    testing.assert_close(x, x, "x")
    assert_type(testing.TOLERANCES, dict[torch.dtype, testing.Tolerance])
    return testing.eager_reasons()


def embed(values: Mapping[str, Any]) -> tuple[Gaps, Options]:
    assert_type(make_options(values), Options)
    records: list[CompileRecord] = []
    assert_type(count_places(records), str)
    try:
        return find_gaps(since=0.0), parse_options(None, values)
    except OrtDynamoError as error:
        raise SystemExit(str(error)) from error
