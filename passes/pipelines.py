"""Options give the ordered tuples of passes; the only file that knows more than one pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import onnx_ir as ir
from onnx_ir.passes.common import (
    CommonSubexpressionEliminationPass,
    IdentityEliminationPass,
    RemoveUnusedFunctionsPass,
    RemoveUnusedNodesPass,
    RemoveUnusedOpsetsPass,
)
from torch.fx.passes.infra.pass_base import PassBase

from ort_dynamo.options.groups import PassOptions, RecomputeOptions
from ort_dynamo.passes.fx.call_foreach import CallForeach
from ort_dynamo.passes.fx.cast_statistics import CastStatistics
from ort_dynamo.passes.fx.copy_small_results import CopySmallResults
from ort_dynamo.passes.fx.drop_running_statistics import DropRunningStatistics
from ort_dynamo.passes.fx.drop_unit_dims import DropUnitDims
from ort_dynamo.passes.fx.expand_log_softmax import ExpandLogSoftmax
from ort_dynamo.passes.fx.fuse_tanh_gelu import FuseTanhGelu
from ort_dynamo.passes.fx.give_strides import GiveStrides
from ort_dynamo.passes.fx.hide_seedless import HideSeedless
from ort_dynamo.passes.fx.hoist_random import HoistRandom
from ort_dynamo.passes.fx.keep_statistics_wide import KeepStatisticsWide
from ort_dynamo.passes.fx.locate_assertions import LocateAssertions
from ort_dynamo.passes.fx.merge_statistics import MergeStatistics
from ort_dynamo.passes.fx.merge_views import MergeViews
from ort_dynamo.passes.fx.recompute.compare_in_forward import CompareInForward
from ort_dynamo.passes.fx.recompute.cut_into_sections import CutIntoSections
from ort_dynamo.passes.fx.recompute.mark_gates import MarkGates
from ort_dynamo.passes.fx.recompute.recompute_arithmetic import RecomputeArithmetic
from ort_dynamo.passes.fx.recompute.recompute_attention_dropout import RecomputeAttentionDropout
from ort_dynamo.passes.fx.recompute.recompute_casts import RecomputeCasts
from ort_dynamo.passes.fx.recompute.recompute_from_inputs import RecomputeFromInputs
from ort_dynamo.passes.fx.recompute.recompute_gelu import RecomputeGelu
from ort_dynamo.passes.fx.recompute.recompute_layers import RecomputeLayers
from ort_dynamo.passes.fx.recompute.recompute_plan import RecomputePlan
from ort_dynamo.passes.fx.recompute.recompute_pointwise import RecomputePointwise
from ort_dynamo.passes.fx.recompute.recompute_to_budget import RecomputeToBudget
from ort_dynamo.passes.fx.recompute.recreate_views import RecreateViews
from ort_dynamo.passes.fx.recompute.save_no_tensors import SaveNoTensors
from ort_dynamo.passes.fx.recompute.save_reads_of_mutated import SaveReadsOfMutated
from ort_dynamo.passes.fx.remove_no_ops import RemoveNoOps
from ort_dynamo.passes.fx.restore_seedless import RestoreSeedless
from ort_dynamo.passes.fx.return_no_views import ReturnNoViews
from ort_dynamo.passes.fx.split_statistics import SplitStatistics
from ort_dynamo.passes.fx.torch_graph.convert_to_channels_last import ConvertToChannelsLast
from ort_dynamo.passes.fx.torch_graph.give_kernel_dtypes import GiveKernelDtypes
from ort_dynamo.passes.fx.torch_graph.permute_images import PermuteImages
from ort_dynamo.passes.fx.torch_graph.place_biases import PlaceBiases
from ort_dynamo.passes.fx.torch_graph.place_foreach import PlaceForeach
from ort_dynamo.passes.fx.torch_graph.place_in_torch import PlaceInTorch
from ort_dynamo.passes.fx.torch_graph.place_slower_operators import PlaceSlowerOperators
from ort_dynamo.passes.fx.torch_graph.place_whole_kernels import PlaceWholeKernels
from ort_dynamo.passes.fx.torch_graph.reinplace import Reinplace
from ort_dynamo.passes.fx.torch_graph.reshape_views import ReshapeViews
from ort_dynamo.passes.fx.write_before_hooks import WriteBeforeHooks
from ort_dynamo.passes.onnx.cast_propagation.propagate_casts import PropagateCasts
from ort_dynamo.passes.onnx.compute_in_half import ComputeInHalf
from ort_dynamo.passes.onnx.copy_numbers import CopyNumbers
from ort_dynamo.passes.onnx.expand_short_runs import ExpandShortRuns
from ort_dynamo.passes.onnx.fold_casts import FoldCasts
from ort_dynamo.passes.onnx.fuse_cross_entropy_gradient import FuseCrossEntropyGradient
from ort_dynamo.passes.onnx.fuse_kernels import FuseKernels
from ort_dynamo.passes.onnx.fuse_row_sum import FuseRowSum
from ort_dynamo.passes.onnx.fused_kernels.kernel import MOST_LONG
from ort_dynamo.passes.onnx.join_pads import JoinPads
from ort_dynamo.passes.onnx.lower_opset import LowerOpset
from ort_dynamo.passes.onnx.merge_transposes import MergeTransposes
from ort_dynamo.passes.onnx.multiply_small_matrices import MultiplySmallMatrices
from ort_dynamo.passes.onnx.remove_round_trips import RemoveRoundTrips
from ort_dynamo.passes.onnx.remove_unread_nodes import RemoveUnreadNodes
from ort_dynamo.passes.onnx.restore_order import RestoreOrder
from ort_dynamo.passes.onnx.separate_outputs import SeparateOutputs
from ort_dynamo.passes.onnx.sink_reads import SinkReads
from ort_dynamo.passes.onnx.sum_small_blocks import SumSmallBlocks
from ort_dynamo.passes.onnx.take_shapes_early import TakeShapesEarly
from ort_dynamo.passes.onnx.transpose_once import TransposeOnce
from ort_dynamo.passes.ordering import AT_FIRST, Condition, check_order
from ort_dynamo.passes.outside import outside_fx_passes, outside_onnx_passes
from ort_dynamo.targets.target import Target

__all__ = [
    "backward_passes",
    "cut_passes",
    "forward_passes",
    "fx_passes",
    "onnx_passes",
    "opset_passes",
    "order_passes",
    "outer_passes",
    "placement_passes",
    "plan_passes",
    "recompute_passes",
    "running_passes",
    "saved_result_passes",
    "section_passes",
]


_P = ParamSpec("_P")
_T = TypeVar("_T", bound=tuple[Any, ...])

MARKED = AT_FIRST | {Condition.RANDOM_APART}
"""The conditions that hold of a joint graph after fx_passes."""

CUT = MARKED | {Condition.STATISTICS_SPLIT, Condition.SEEDLESS_HIDDEN, Condition.VIEWS_MERGED}
"""Those that hold of the graphs that the partitioner makes after cut_passes."""

OWNED = AT_FIRST | {Condition.RESULTS_OWNED}
"""Those that hold of an outer graph after outer_passes."""

FINISHED = frozenset({Condition.OUTPUTS_SEPARATE, Condition.NO_DEAD_NODES})
"""Those that a model needs before it is opened."""


def _checked(
    holding: Set[Condition] = AT_FIRST, until: Set[Condition] = frozenset()
) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Check the order of the passes that a function gives: `holding` before the first, `until` after the last."""

    def checked(pipeline: Callable[_P, _T]) -> Callable[_P, _T]:
        @wraps(pipeline)
        def built(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            passes = pipeline(*args, **kwargs)
            left = until - check_order(passes, holding)
            assert not left, f"{pipeline.__name__} does not give {left}"
            return passes

        return built

    return checked


_SECTIONS = 8
"""Maximum number of backward sections: live tensors then exceed eager's by an eighth of the freed bytes."""


@_checked()
def fx_passes(options: PassOptions, *, keep_random: bool = False, deterministic: bool = False) -> tuple[PassBase, ...]:
    """Give the passes on a joint graph before it is cut, or on an inference graph.

    Args:
        options: whose extra passes run, too.
        keep_random: whether random ops stay in the graph, for a model that runs them itself.
        deterministic: whether the graph runs under torch.use_deterministic_algorithms(True).
    """
    hoisted = () if keep_random else (HoistRandom(deterministic),)
    ours = (RemoveNoOps(), DropUnitDims(), DropRunningStatistics(), KeepStatisticsWide(), MarkGates(), *hoisted)
    return (*outside_fx_passes(first=True), *ours, *outside_fx_passes(options.extra_passes, first=False))


@_checked(MARKED)
def placement_passes(
    options: PassOptions, target: Target, threads: int, *, deterministic: bool = False
) -> tuple[PassBase, ...]:
    """Give the passes on a joint or inference graph that depend on the target, such as those that place nodes in torch.

    They run after fx_passes, whose results may be faster in a session.

    Args:
        options: whether anything is chosen.
        target: the target of the sessions.
        threads: how many a session has.
        deterministic: whether the graph runs under torch.use_deterministic_algorithms(True).
    """
    expand = (ExpandLogSoftmax(MOST_LONG),) if target.fuses_kernels else ()
    # Each node passes over memory on a CPU.
    gelus = (FuseTanhGelu(),) if options.fuse and target.facts.walks_entries else ()
    chooses = options.placement != "onnxruntime"
    biases = (PlaceBiases(chooses),) if target.fuses_kernels else ()
    if not chooses:
        return (*expand, *gelus, *biases)
    facts = target.facts
    whole = any((
        facts.leaves_convolution_gradients, facts.leaves_normalizations, facts.leaves_attention, facts.leaves_loops,
        facts.adds_in_any_order,
    ))  # fmt: skip
    # The first two decide which graphs torch runs as a whole, so that the third pays for no boundary there.
    return (
        *expand,
        *gelus,
        *([PermuteImages()] if facts.permutes_images else []),
        PlaceInTorch(target, threads),
        *([PlaceWholeKernels(target, deterministic)] if whole else []),
        PlaceSlowerOperators(target, threads),
        *biases,
        *([PlaceForeach()] if target.fuses_kernels else []),
        GiveKernelDtypes(),  # all that is torch's by choice is known
        *([ConvertToChannelsLast()] if facts.converts_to_channels_last else []),
    )


@_checked(MARKED)
def saved_result_passes(outputs: int) -> tuple[PassBase, ...]:
    """Give the passes on a joint graph, of whose results `outputs` are the forward's, that change its saved tensors.

    They run before all passes that tag nodes to be recomputed.
    """
    return (CompareInForward(outputs),)


@_checked(MARKED)
def recompute_passes(
    options: RecomputeOptions, static: tuple[int, ...] = (), least: int | None = None, *, fused: bool = False
) -> tuple[PassBase, ...]:
    """Give the passes that tag the nodes that the backward recomputes; each leaves earlier decisions alone.

    They run on the joint graph after fx_passes: random ops are known.

    Args:
        options: which of them.
        static: indices of the graph's inputs that are parameters or buffers.
        least: bytes of a result of arithmetic from which it is recomputed with any options; None for never.
        fused: whether arithmetic is computed in the kernel of its reader.
    """
    return (
        SaveReadsOfMutated(),
        *([RecomputeCasts(static)] if options.recompute_casts else []),
        RecomputeArithmetic(least),  # it costs nothing, so there is no option
        *([RecomputePointwise()] if fused else []),
        *([RecomputePlan(options.recompute_plan)] if options.recompute_plan else []),
        *([RecomputeAttentionDropout()] if options.attn_dropout_recompute else []),
        *([RecomputeGelu()] if options.gelu_recompute else []),
        *([RecomputeLayers(options.number_recompute_layers)] if options.transformer_layer_recompute else []),
        *([RecomputeFromInputs()] if options.recompute_from_inputs else []),
        *([RecomputeToBudget(options.budget())] if options.memory_budget is not None else []),
    )


@_checked(MARKED)
def cut_passes() -> tuple[PassBase, ...]:
    """Give the passes on a joint graph when all is tagged, right before the partitioner cuts it."""
    return (SplitStatistics(), HideSeedless(), MergeViews(), RecreateViews())


@_checked(CUT)
def forward_passes() -> tuple[PassBase, ...]:
    """Give the passes on the forward that the partitioner has made."""
    return (RestoreSeedless(), MergeStatistics())


@_checked(CUT)
def backward_passes() -> tuple[PassBase, ...]:
    """Give the passes on the backward from the partitioner, and on the joint graph after it."""
    return (RestoreSeedless(),)


@_checked()
def section_passes(
    options: PassOptions, target: Target, freed: tuple[str, ...], *, saved: bool
) -> tuple[PassBase, ...]:
    """Give the passes that cut a backward into sections.

    Args:
        options: into how many at most.
        target: the target of the sessions.
        freed: names of the placeholders that nothing but the backward holds.
        saved: whether its models are saved. Then it is whole, unless the options say otherwise: in a session that equal
            layers share all nodes have the names of one of them.
    """
    most = options.backward_sections or (1 if saved else _SECTIONS)
    return (CutIntoSections(freed, target.facts.section_bytes, most),) if most > 1 else ()


def plan_passes(outputs: int) -> tuple[PassBase, ...]:
    """Give the passes on a forward with `outputs` results of its own, which runs in eager for a memory plan."""
    return (SaveNoTensors(outputs),)


@_checked()
def outer_passes(seen: slice) -> tuple[PassBase, ...]:
    """Give the passes on an outer graph around islands, of whose outputs the program sees those in `seen`."""
    return (CopySmallResults(seen), LocateAssertions(), CastStatistics())


@_checked(OWNED)
def running_passes(
    seen: slice,
    views: frozenset[int],
    *,
    returned: slice,
    strides: Mapping[int, tuple[int, ...]],
    written: Mapping[int, int],
) -> tuple[PassBase, ...]:
    """Give the passes on an outer graph that is to be run and no longer described: it may write over its tensors.

    Args:
        seen: which of its outputs the program sees.
        views: the indices of outputs that are views to eager, too.
        returned: which of its outputs go to the program or to autograd.
        strides: index of an output -> its strides in eager, where they are known and the graph may give others.
        written: index of an output -> index of the input without gradient that it is written to.
    """
    return (
        GiveStrides(returned, strides),
        ReturnNoViews(seen, views),
        ReshapeViews(),
        CallForeach(),
        Reinplace(),
        *([WriteBeforeHooks(written, slice(seen.stop, None))] if written else []),
    )


@_checked(until=FINISHED)
def onnx_passes(options: PassOptions, target: Target, threads: int) -> tuple[ir.passes.InPlacePass, ...]:
    """Give the passes on each lowered model, in order.

    Args:
        options: which of them.
        target: the target of the session.
        threads: the number of threads for choices between forms.
    """
    casts = PropagateCasts(
        strategy=options.propagate_cast_ops_strategy,
        level=options.propagate_cast_ops_level,
        allow=options.propagate_cast_ops_allow,
        allow_layer_norm_mod_precision=options.allow_layer_norm_mod_precision,
        target=target,
    )
    dense = (FuseRowSum(), TransposeOnce()) if target.facts.prefers_dense_products else ()
    # Without the nodes that the passes on casts have replaced: one that is not read reads its inputs, too.
    joins = (RemoveUnusedNodesPass(), MergeTransposes(), JoinPads(target.facts.walks_entries))
    small = (
        (MultiplySmallMatrices.of(threads), SumSmallBlocks.of(threads), ExpandShortRuns.of(threads))
        if target.facts.slow_at_small_sizes
        else ()
    )
    fusions = (*joins, FuseCrossEntropyGradient(), *dense, *small) if options.fuse else ()
    return (
        *outside_onnx_passes(first=True),
        # While each operator has casts of its own, and before those between two operators go.
        *([ComputeInHalf(target, options.excess_precision)] if target.facts.computes_in_half else []),
        IdentityEliminationPass(),
        SeparateOutputs(),  # the next pass gives two outputs that are one value the same name when it merges it
        CommonSubexpressionEliminationPass(),
        FoldCasts(),
        RemoveRoundTrips(options.excess_precision),  # after equal casts are one
        casts,  # the remaining casts; before the fusions, which make float32 nodes that stay float32
        *fusions,
        *outside_onnx_passes(options.extra_passes, first=False),
        TakeShapesEarly(),  # after all that moves casts
        # After all that makes or moves arithmetic, and without the nodes that the fusions have replaced.
        *([RemoveUnusedNodesPass(), FuseKernels()] if target.fuses_kernels else []),
        *([CopyNumbers()] if target.facts.keeps_sizes_on_host else []),  # after the kernels that take numbers
        RemoveUnreadNodes(),
        RemoveUnusedNodesPass(),  # after the fusions, which leave the constants of the nodes that they replace
        *([RemoveUnusedFunctionsPass()] if target.fuses_kernels else []),  # type: ignore[no-untyped-call]
        RemoveUnusedOpsetsPass(),
        SeparateOutputs(),  # last: the passes above merge outputs that are equal
    )


@_checked()
def order_passes(model: ir.Model) -> tuple[ir.passes.InPlacePass, ...]:
    """Give the passes on ONNX Runtime's optimized form of `model`, whose order is wanted."""
    return (RestoreOrder.of(model), SinkReads())


def opset_passes(version: int) -> tuple[ir.passes.InPlacePass, ...]:
    """Give the passes on a finished model that is to have opset `version`, its own or an older one."""
    return (LowerOpset(version),)
