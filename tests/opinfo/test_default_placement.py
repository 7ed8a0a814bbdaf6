"""Tests of operators that torch runs by choice, against eager: the only operator tests with placement on.

All other tests of operators switch placement off, to run the lowerings. Here boundaries are free, so that torch runs
each operator of the table of slower operators, and each convolution, also in the small samples of the database.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import torch
from gradients import Calls
from opinfo_samples import check_sample, operators, quiet, samples_of
from torch import Tensor
from torch._dynamo.utils import counters
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from ort_dynamo.passes.fx.torch_graph.count_multiplications import CONVOLUTIONS
from ort_dynamo.passes.fx.torch_graph.slower_operators import FORMS
from ort_dynamo.runtime.installed.providers import usable_target
from ort_dynamo.targets.prices import ConvolutionPrices, WholeGraphPrices
from ort_dynamo.targets.target import Target
from ort_dynamo.torch_internals.kernels.operators import aten, is_absent

pytestmark = pytest.mark.default_placement

SAMPLES = 3
"""The number of samples that run for each overload, of those that reach it."""

REACHED: dict[str, tuple[Any, ...]] = {
    **{
        f"nn.functional.conv{kind}d": CONVOLUTIONS
        for kind in ("1", "2", "3", "_transpose1", "_transpose2", "_transpose3")
    },
    "nextafter": (aten.nextafter.default,),
    "frexp": (aten.frexp.Tensor,),
    "atan2": (aten.atan2.default,),
    "lgamma": (aten.lgamma.default,),
    "remainder": (aten.remainder.Tensor,),
    "log1p": (aten.log1p.default,),
    "nn.functional.threshold": (aten.threshold.default, aten.threshold_backward.default),
    "sign": (aten.sign.default,),
    "nn.functional.hardshrink": (aten.hardshrink.default, aten.hardshrink_backward.default),
    "nn.functional.softshrink": (aten.softshrink.default, aten.softshrink_backward.default),
    "nn.functional.hardswish": (aten.hardswish.default, aten.hardswish_backward.default),
    "nn.functional.hardsigmoid": (aten.hardsigmoid.default, aten.hardsigmoid_backward.default),
    "nn.functional.prelu": (aten._prelu_kernel.default,),
    "rsqrt": (aten.rsqrt.default,),
    "nn.functional.huber_loss": (aten.huber_loss.default, aten.huber_loss_backward.default),
    "nn.functional.smooth_l1_loss": (aten.smooth_l1_loss.default, aten.smooth_l1_loss_backward.default),
    "nn.functional.nll_loss": (aten.nll_loss_forward.default, aten.nll_loss_backward.default),
    "nn.functional.layer_norm": (aten.native_layer_norm.default, aten.native_layer_norm_backward.default),
    "nn.functional.group_norm": (aten.native_group_norm.default, aten.native_group_norm_backward.default),
    "linalg.vector_norm": (aten.linalg_vector_norm.default,),
    "prod": (aten.prod.default, aten.prod.dim_int),
    "igamma": (aten.igamma.default,),
    "igammac": (aten.igammac.default,),
    "cummax": (aten.cummax.default,),
    "cummin": (aten.cummin.default,),
    "cumprod": (aten.cumprod.default,),
    "cumsum": (aten.cumsum.default,),
    "flip": (aten.flip.default,),
    "nn.functional.embedding_bag": (aten._embedding_bag.default, aten._embedding_bag_forward_only.default),
    "nn.functional.grid_sample": (aten.grid_sampler_2d.default, aten.grid_sampler_2d_backward.default),
    "nn.functional.adaptive_max_pool2d": (aten.adaptive_max_pool2d.default,),
    "nn.functional.interpolate.nearest": (aten.upsample_nearest2d_backward.default,),
    "index_add": (aten.index_add.default,),
    "scatter": (aten.scatter.src, aten.scatter.value),
    "scatter_add": (aten.scatter_add.default,),
    "index_reduce.amax": (aten.index_reduce.default,),
    "index_copy": (aten.index_copy.default,),
    "masked_scatter": (aten.masked_scatter.default,),
    "exp2": (aten.exp2.default,),
    "index_put": (aten.index_put.default,),
    "nn.functional.embedding": (aten.embedding_dense_backward.default,),
}
"""Operator of the database -> overloads that torch has to run by choice in some of its samples."""

INDEX = torch.tensor([0, 2, 2, 1])

WRITTEN_OUT: dict[Any, Callable[[Tensor], Any]] = {
    aten.clone.default: lambda x: x[:, None].expand(-1, 3, -1, -1, -1).clone(),
    aten.remainder.Scalar: lambda x: x % 0.7,
    aten.col2im.default: lambda x: torch.nn.functional.unfold(x, 3, padding=1, stride=2) * 2,
    aten.cummax.default: lambda x: x.cummax(-1),
    aten.cummin.default: lambda x: x.cummin(-1),
    aten.cumsum.default: lambda x: x.cumsum(-1),
    aten.index_add.default: lambda x: x.index_add(0, INDEX, x.flip(1)),
    aten.scatter_reduce.two: lambda x: x.scatter_reduce(0, INDEX[:1].expand(x.shape), x.flip(1), "mean"),
    aten.scatter.value: lambda x: x.scatter(-1, INDEX.expand(3, 2, 1, 4), 0.5),
    aten.linalg_vector_norm.default: lambda x: torch.linalg.vector_norm(x, dim=-1),
}
"""Overload -> a function of an image in the form that was measured; no sample has it, or one in many."""

NOT_COMPILED = {
    "index_put": "a mask has as many indices as its data says, so Dynamo breaks the graph",
}
"""Operator with samples that, alone, never reach the backend -> the reason."""

PLACEMENTS = ("alone", "between")
"""The surroundings of the operator: none, so that torch can run all, or sessions before and after it."""


@pytest.fixture(params=PLACEMENTS)
def placement(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Make torch run each operator by choice, on one thread: on several, no session runs between convolutions."""
    prices = usable_target("cpu").prices
    assert prices.operators is not None
    never = WholeGraphPrices(-1, -1, 1)
    free = replace(prices.operators, cut=-1, crossing=0, spinning=0)
    convolutions = ConvolutionPrices(never, never, never) if request.param == "between" else prices.convolutions
    monkeypatch.setattr(Target, "prices", replace(prices, operators=free, convolutions=convolutions))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield request.param
    torch.set_num_threads(before)


def test_every_operator_that_may_be_chosen_is_run() -> None:
    run = {overload for overload in chain(*REACHED.values(), WRITTEN_OUT) if not is_absent(overload)}
    assert run == {*FORMS, *CONVOLUTIONS}


@pytest.mark.parametrize("name", REACHED)
def test_an_operator_that_torch_runs_by_choice_gives_eagers_results(name: str, placement: str) -> None:
    op = operators()[name]
    samples = samples_of(op, torch.float32, limit=None)
    reaching = {overload: [one for one in samples if overload in called(op, one)] for overload in REACHED[name]}
    first = {id(sample): sample for found in reaching.values() for sample in spread(found)}
    others = [sample for sample in chain(*reaching.values()) if id(sample) not in first]
    expected = [one for one in REACHED[name] if one not in WRITTEN_OUT and not is_absent(one)]
    check(op, list(first.values()), expected, placement, others=others)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_narrow_convolution_gives_eagers_results(dtype: torch.dtype, placement: str) -> None:
    op = operators()["nn.functional.conv2d"]
    check(op, samples_of(op, dtype, limit=SAMPLES), CONVOLUTIONS, placement, dtype)


@pytest.mark.parametrize("overload", WRITTEN_OUT, ids=str)
def test_a_form_that_the_database_lacks_gives_eagers_results(overload: Any, placement: str) -> None:
    op = copy.copy(operators()["clone"])
    op.op = WRITTEN_OUT[overload]
    check(op, [SampleInput(torch.randn(4, 3, 4, 5, requires_grad=True))], [overload], placement)


def check(
    op: OpInfo,
    samples: list[SampleInput],
    overloads: Iterable[Any],
    placement: str,
    dtype: torch.dtype = torch.float32,
    others: Iterable[SampleInput] = (),
) -> None:
    """Compare samples with eager, in training and in inference, with images in both layouts.

    Args:
        op: the operator.
        samples: the samples.
        overloads: the overloads that torch has to run by choice in some sample.
        placement: one of PLACEMENTS.
        dtype: the dtype of the samples.
        others: samples that are run, one after another, until each overload has been chosen.
    """
    subject = between_sessions(op) if placement == "between" else op
    breaks = placement == "alone" and op.full_name in NOT_COMPILED
    expected, chosen, in_sessions, left_out = {str(overload) for overload in overloads}, set[str](), 0, False
    every = [*samples, *filter(None, map(channels_last, samples))]
    for index, sample in enumerate((*every, *others)):
        if index >= len(every) and expected <= chosen:
            break
        for used in (sample, detached(sample)):
            verdict = check_sample(subject, used, dtype, dynamic=False, in_place=False)
            if verdict.kind == "not compiled" and breaks:
                left_out = True
                continue
            assert verdict.kind in ("same", "more exact"), f"{verdict.kind}: {verdict.detail} of {used}"
            assert not verdict.eager
            chosen |= {reason.split(":")[0] for reason in counters["ort_train_chosen"]}
            in_sessions += counters["ort_train"]["native_nodes"]
    assert expected <= chosen
    assert in_sessions or placement == "alone"
    assert left_out == breaks, "every sample of a listed operator is compiled"


def between_sessions(op: OpInfo) -> OpInfo:
    """Multiply all floats before and after an operator: a session's work that rounds as torch does."""
    function = op.op

    def surrounded(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map(scaled, (args, kwargs))
        return tree_map(scaled, function(*args, **kwargs))

    found = copy.copy(op)
    found.op = surrounded
    return found


def scaled(value: Any) -> Any:
    return value * 0.75 if isinstance(value, Tensor) and value.is_floating_point() else value


def channels_last(sample: SampleInput) -> SampleInput | None:
    """Lay out a sample's images in channels_last; None where there are none."""

    def converted(value: Tensor) -> Tensor:
        if value.dim() != 4:
            return value
        return value.detach().contiguous(memory_format=torch.channels_last).requires_grad_(value.requires_grad)

    has_images = any(one.dim() == 4 for one in tensors(sample.input, sample.args, sample.kwargs))
    return changed(sample, converted) if has_images else None


def detached(sample: SampleInput) -> SampleInput:
    """Give a sample without gradients, which is compiled as inference."""
    return changed(sample, Tensor.detach)


def changed(sample: SampleInput, change: Callable[[Tensor], Tensor]) -> SampleInput:
    """Apply a function to all tensors of a sample."""
    value, args, kwargs = tree_map_only(Tensor, change, (sample.input, tuple(sample.args), dict(sample.kwargs)))
    return SampleInput(value, args=args, kwargs=kwargs)


def tensors(*values: Any) -> list[Tensor]:
    return [one for one in tree_leaves(values) if isinstance(one, Tensor)]


def spread(samples: list[SampleInput]) -> list[SampleInput]:
    """Pick at most SAMPLES of them, evenly spread."""
    last = len(samples) - 1
    return [samples[index] for index in sorted({round(i * last / (SAMPLES - 1)) for i in range(SAMPLES)}) if samples]


def called(op: OpInfo, sample: SampleInput) -> set[Any]:
    """List the overloads that the operator calls in eager, in training and in inference."""
    with quiet(), Calls() as calls:
        for used in (sample, detached(sample)):
            results = tensors(op.op(used.input, *used.args, **used.kwargs))
            if losses := [one.sum() for one in results if one.requires_grad]:
                torch.autograd.backward(losses)
    return calls.overloads
