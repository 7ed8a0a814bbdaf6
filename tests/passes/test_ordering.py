"""A pass at a wrong place is an error when the pipeline is built; conditions that nothing needs are none."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import pytest
from torch.fx import GraphModule
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from ort_dynamo.errors import PassOrderError
from ort_dynamo.options.groups import PassOptions, RecomputeOptions
from ort_dynamo.passes import ordering, pipelines
from ort_dynamo.passes.ordering import AT_FIRST, Condition, check_order, ordering_of
from ort_dynamo.runtime.installed.providers import recorded_cpu_targets, recorded_cuda_targets

CPU = recorded_cpu_targets()[0]
CUDA = dataclasses.replace(recorded_cuda_targets()[-1], fuses_kernels=True)
ALL = RecomputeOptions(
    attn_dropout_recompute=True,
    gelu_recompute=True,
    transformer_layer_recompute=True,
    recompute_from_inputs=True,
    memory_budget=0.5,
    recompute_plan=("Gelu+:1:-1",),  # type: ignore[arg-type]
)

MODEL = ir.from_onnx_text("""<ir_version: 10, opset_import: ["" : 20]> g (float[2] x) => (float[2] y) { y = Neg(x) }""")

PIPELINES: dict[str, tuple[Callable[[], Sequence[Any]], frozenset[Condition]]] = {
    "fx": (lambda: pipelines.fx_passes(PassOptions()), AT_FIRST),
    "placement on the CPU": (lambda: pipelines.placement_passes(PassOptions(), CPU, 1), pipelines.MARKED),
    "placement on CUDA": (lambda: pipelines.placement_passes(PassOptions(), CUDA, 1), pipelines.MARKED),
    "recompute": (lambda: pipelines.recompute_passes(ALL, fused=True), pipelines.MARKED),
    "cut": (pipelines.cut_passes, pipelines.MARKED),
    "forward": (pipelines.forward_passes, pipelines.CUT),
    "running": (
        lambda: pipelines.running_passes(slice(1), frozenset(), returned=slice(1), strides={}, written={0: 0}),
        pipelines.OWNED,
    ),
    "onnx on the CPU": (lambda: pipelines.onnx_passes(PassOptions(), CPU, 1), AT_FIRST),
    "onnx on CUDA": (lambda: pipelines.onnx_passes(PassOptions(), CUDA, 1), AT_FIRST),
    "order": (lambda: pipelines.order_passes(MODEL), AT_FIRST),
}


def test_each_pipeline_begins_with_the_conditions_of_those_before_it() -> None:
    marked = check_order(pipelines.fx_passes(PassOptions()))
    assert marked == pipelines.MARKED
    for placement in ("placement on the CPU", "placement on CUDA"):
        assert check_order(PIPELINES[placement][0](), marked) >= pipelines.MARKED
    decided = check_order(PIPELINES["recompute"][0](), marked)
    cut = check_order(pipelines.cut_passes(), decided)
    assert cut >= pipelines.CUT - AT_FIRST
    assert check_order(pipelines.outer_passes(slice(1))) == pipelines.OWNED


@pytest.mark.parametrize("name", PIPELINES)
def test_a_pass_before_the_one_that_gives_its_condition_is_refused(name: str) -> None:
    build, holding = PIPELINES[name]
    passes = build()
    check_order(passes, holding)
    for index, pass_ in enumerate(passes):
        for condition in ordering_of(pass_).needs - holding:
            givers = [i for i in range(index) if condition in ordering_of(passes[i]).gives]
            without = [one for i, one in enumerate(passes[: index + 1]) if i not in givers]
            with pytest.raises(PassOrderError, match=f"in the wrong place: it needs that {condition.value}"):
                check_order(without, holding)


@pytest.mark.parametrize("name", PIPELINES)
def test_a_pass_after_the_one_that_ends_its_condition_is_refused(name: str) -> None:
    build, holding = PIPELINES[name]
    passes = list(build())
    for index, pass_ in enumerate(passes):
        needs = ordering_of(pass_).needs
        for later in passes[index + 1 :]:
            stated = ordering_of(later)
            if ended := (stated.ends - stated.gives) & needs & holding:
                again = [*(one for one in passes[: passes.index(later) + 1] if one is not pass_), pass_]
                with pytest.raises(PassOrderError, match=f"{min(ended, key=lambda c: c.name).value}|needs that"):
                    check_order(again, holding)


def test_each_condition_is_needed_and_can_hold() -> None:
    stated = ordering._STATED.values()
    needed = {condition for one in stated for condition in one.needs} | pipelines.FINISHED
    assert needed == set(Condition)
    assert AT_FIRST | {condition for one in stated for condition in one.gives} == set(Condition)


@dataclass(frozen=True)
class Own(PassBase):
    """A pass of a program's own."""

    def call(self, graph_module: GraphModule) -> PassResult:
        return PassResult(graph_module, False)


def test_a_pass_that_states_nothing_may_stand_anywhere() -> None:
    for build, holding in PIPELINES.values():
        passes = build()
        for index in range(len(passes) + 1):
            assert check_order([*passes[:index], Own(), *passes[index:]], holding) == check_order(passes, holding)


def test_the_message_names_the_pass_that_would_help() -> None:
    with pytest.raises(PassOrderError) as caught:
        check_order([pipelines.RecreateViews()])
    assert str(caught.value) == (
        "The pass RecreateViews is in the wrong place: it needs that views of views are views of their base, and no "
        "pass before it gives that; MergeViews would."
    )
    with pytest.raises(PassOrderError, match="and Reinplace, which runs before it, ends that"):
        check_order([pipelines.Reinplace(), pipelines.CallForeach()], pipelines.OWNED | {Condition.STRIDES_GIVEN})
