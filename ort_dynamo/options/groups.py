"""Options of torch.compile(backend="ort_train"): frozen, validated, grouped by the stage that reads them.

A group's repr enters the keys of graphs; the repr of `cache` does not. A graph to be saved or verified is always built.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import onnx_ir as ir
import torch
from torch.fx.passes.infra.pass_base import PassBase

from ort_dynamo.errors import InvalidOptionError, UnknownModeError, UnknownOptionError
from ort_dynamo.options.cast_strategy import PropagateCastOpsStrategy, checked_allow, checked_level, checked_strategy
from ort_dynamo.options.checks import checked_path, is_bool, is_count, is_thread_count, one_of
from ort_dynamo.options.plan_grammar import Plan, read_plans
from ort_dynamo.options.public import public_name, read_options
from ort_dynamo.options.session_attributes import is_mapping, plain_attributes
from ort_dynamo.options.spelling import nearest

__all__ = [
    "MODES",
    "CacheOptions",
    "DumpOptions",
    "Options",
    "PassOptions",
    "RecomputeOptions",
    "SegmentOptions",
    "SessionOptions",
    "SessionSettings",
    "VerifyOptions",
    "flushes_denormals",
    "make_options",
    "parse_options",
]

GraphOptimization = Literal["disable", "basic", "extended", "all"]


@dataclass(frozen=True)
class SegmentOptions:
    """Read by segment/segment.py, and the last by listeners/compare_ranks.py.

    Attributes:
        fallback: "eager" runs a node that ONNX Runtime cannot take in eager, alone; "error" raises instead.
        contrib_ops: whether models may have operators that ONNX Runtime has beside the standard.
        compare_ranks: whether ranks of a process group that compile the same graph have to decide the same.
    """

    fallback: Literal["eager", "error"] = "eager"
    contrib_ops: bool = True
    compare_ranks: bool = True

    def __post_init__(self) -> None:
        one_of("fallback", self.fallback, ("eager", "error"))
        is_bool("contrib_ops", self.contrib_ops)
        is_bool("compare_ranks", self.compare_ranks)


@dataclass(frozen=True)
class PassOptions:
    """Read by passes/pipelines.py.

    Attributes:
        placement: "fastest" runs all nodes in torch that are faster there, such as convolutions on the CPU;
            "onnxruntime" runs only nodes in torch that cannot run in ONNX Runtime.
        fuse: run our fusions after lowering, and fused kernels on CUDA. Clean-up passes always run.
        excess_precision: keep bfloat16 values in float32 between operators that lack a bfloat16 kernel; otherwise they
            are rounded after each operator, as in eager.
        propagate_cast_ops_strategy: how casts between float32 and narrower dtypes move; a member or its name.
        propagate_cast_ops_level: -1 does not move casts; 0, 1 and 2 let them cross more and more operators.
        propagate_cast_ops_allow: more ONNX operator types that casts may cross, at every level from 0.
        allow_layer_norm_mod_precision: casts may also cross layer normalizations.
        backward_sections: the maximum number of sections of a backward, each with its own sessions, so that saved
            tensors are freed earlier; 1 does not cut it. None is 8, or 1 if models are saved.
        extra_passes: the program's passes, which run like those of register_pass, in this compile alone.
    """

    placement: Literal["fastest", "onnxruntime"] = "fastest"
    fuse: bool = True
    excess_precision: bool = True
    propagate_cast_ops_strategy: PropagateCastOpsStrategy = PropagateCastOpsStrategy.FLOOD_FILL
    propagate_cast_ops_level: int = 1
    propagate_cast_ops_allow: tuple[str, ...] = ()
    allow_layer_norm_mod_precision: bool = False
    backward_sections: int | None = None
    extra_passes: tuple[PassBase | ir.passes.InPlacePass, ...] = ()

    def __post_init__(self) -> None:
        one_of("placement", self.placement, ("fastest", "onnxruntime"))
        is_bool("fuse", self.fuse)
        is_bool("excess_precision", self.excess_precision)
        object.__setattr__(self, "propagate_cast_ops_strategy", checked_strategy(self.propagate_cast_ops_strategy))
        checked_level(self.propagate_cast_ops_level)
        object.__setattr__(self, "propagate_cast_ops_allow", checked_allow(self.propagate_cast_ops_allow))
        is_bool("allow_layer_norm_mod_precision", self.allow_layer_norm_mod_precision)
        is_count("backward_sections", self.backward_sections)
        given = self.extra_passes
        is_list = isinstance(given, (list, tuple))
        if not is_list or not all(isinstance(one, (PassBase, ir.passes.InPlacePass)) for one in given):
            expected = "a list of instances of torch.fx's PassBase or onnx_ir's InPlacePass"
            raise InvalidOptionError(name="extra_passes", value=given, expected=expected)
        object.__setattr__(self, "extra_passes", tuple(given))


@dataclass(frozen=True)
class RecomputeOptions:
    """Read by passes/pipelines.py: the tensors that the backward recomputes instead of the forward saving them.

    Attributes:
        recompute_casts: float32 of saved narrower tensors, and casts of parameters.
        attn_dropout_recompute: the dropout between an attention's softmax and its values.
        gelu_recompute: GELU outputs that a matmul reads.
        transformer_layer_recompute: the inside of layers; the inputs of a layer are saved.
        number_recompute_layers: the number of layers, from the first; 0 means all but the last.
        recompute_from_inputs: results of one pointwise operator on tensors that are saved anyway.
        memory_budget: save at most this much for the backward: a fraction in [0, 1] of the bytes that are saved without
            recomputation, or bytes as text ("2GiB", "500MB"). None sets no limit.
        recompute_plan: clusters of operators to recompute, in the grammar of plan_grammar.py: text, a list of
            texts or the path of a JSON file with such a list, which is read here and only its content kept.
    """

    recompute_casts: bool = True
    attn_dropout_recompute: bool = False
    gelu_recompute: bool = False
    transformer_layer_recompute: bool = False
    number_recompute_layers: int = 0
    recompute_from_inputs: bool = False
    memory_budget: float | str | None = None
    recompute_plan: tuple[Plan, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "recompute_plan", read_plans(self.recompute_plan))
        flags = (
            "recompute_casts",
            "attn_dropout_recompute",
            "gelu_recompute",
            "transformer_layer_recompute",
            "recompute_from_inputs",
        )
        for name in flags:
            is_bool(name, getattr(self, name))
        count = self.number_recompute_layers
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise InvalidOptionError(name="number_recompute_layers", value=count, expected="an int >= 0")
        if self.memory_budget is not None:
            self.budget()

    def budget(self) -> float | int:
        """memory_budget, which is not None, as a fraction (float) or in bytes (int)."""
        given = self.memory_budget
        if isinstance(given, str) and (match := _BYTES.fullmatch(given.strip())):
            return int(float(match["number"]) * _UNITS[match["unit"].lower()])
        if isinstance(given, (int, float)) and not isinstance(given, bool) and 0 <= given <= 1:
            return float(given)
        expected = "a fraction in [0, 1], or bytes with a unit as text, e.g. '2GiB'"
        raise InvalidOptionError(name="memory_budget", value=given, expected=expected)


_UNITS = {"b": 1} | {
    prefix + suffix: base**power
    for suffix, base in (("b", 1000), ("ib", 1024))
    for power, prefix in enumerate("kmgt", start=1)
}
_BYTES = re.compile(r"(?P<number>\d{1,18}(\.\d{1,18})?)\s*(?P<unit>b|[kmgt]i?b)", re.IGNORECASE)


@dataclass(frozen=True)
class SessionOptions:
    """Read by runtime/session.py.

    Attributes:
        graph_optimization: ONNX Runtime's own optimization level.
        intra_op_num_threads: the threads of a CPU session; None uses torch.get_num_threads() at the compile.
        provider_options: (name, value) pairs for the execution provider.
        session_options: (attribute, value) pairs of onnxruntime.SessionOptions, set after ours; a SessionOptions gives
            its attributes that differ from a new one's.
        cuda_graphs: on CUDA, record a graph of static shapes once, and replay it in one launch.
    """

    graph_optimization: GraphOptimization = "all"
    intra_op_num_threads: int | None = None
    provider_options: tuple[tuple[str, str], ...] = ()
    session_options: tuple[tuple[str, str | int | bool], ...] = ()
    cuda_graphs: bool = False

    def __post_init__(self) -> None:
        one_of("graph_optimization", self.graph_optimization, ("disable", "basic", "extended", "all"))
        is_thread_count("intra_op_num_threads", self.intra_op_num_threads)
        is_bool("cuda_graphs", self.cuda_graphs)
        given = self.provider_options
        if not is_mapping(given):
            raise InvalidOptionError(name="provider_options", value=given, expected="a dict of str to str")
        items = given.items() if isinstance(given, Mapping) else given
        object.__setattr__(self, "provider_options", tuple(sorted((str(k), str(v)) for k, v in items)))
        attributes = plain_attributes(self.session_options)
        # Those that are options of ours are decided once, in the place that other code reads.
        level = attributes.pop("graph_optimization_level", None)
        if level is not None:
            if isinstance(level, bool) or level not in _LEVELS:
                expected = "one of " + ", ".join(map(str, _LEVELS))
                name = "session_options['graph_optimization_level']"
                raise InvalidOptionError(name=name, value=level, expected=expected)
            object.__setattr__(self, "graph_optimization", _LEVELS[int(level)])
        count = attributes.pop("intra_op_num_threads", 0)
        if count != 0 or isinstance(count, bool):  # 0 is the value of a new SessionOptions
            is_thread_count("session_options['intra_op_num_threads']", count)
            object.__setattr__(self, "intra_op_num_threads", count)
        object.__setattr__(self, "session_options", tuple(sorted(attributes.items())))

    def resolved(self, *, on_cuda: bool = False) -> SessionSettings:
        """Fill in the options that are left to torch's present settings; keys hold the result.

        Args:
            on_cuda: whether those of CUDA count. Elsewhere a change of one of them changes nothing.
        """
        backends: Any = torch.backends  # the older names of the same raise where a program has used the newer ones
        precisions = (backends.cuda.matmul.fp32_precision, backends.cudnn.conv.fp32_precision)
        return SessionSettings(
            graph_optimization=self.graph_optimization,
            intra_op_num_threads=self.intra_op_num_threads or torch.get_num_threads(),
            provider_options=self.provider_options,
            session_options=self.session_options,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            tf32=on_cuda and set(precisions) == {"tf32"},
            searches_convolutions=on_cuda and torch.backends.cudnn.benchmark,
            cuda_graphs=on_cuda and self.cuda_graphs,
            flushes_denormals=flushes_denormals(),
        )


def flushes_denormals() -> bool:
    """Check whether torch.set_flush_denormal is on in this thread; torch has no call that says it."""
    smallest = sys.float_info.min
    return smallest / 2 == 0


@dataclass(frozen=True)
class SessionSettings:
    """SessionOptions with every value decided.

    Attributes:
        deterministic: torch.use_deterministic_algorithms() was on.
        tf32: torch let CUDA round float32 to TF32 in matmuls and in convolutions alike. ONNX Runtime has
            one switch for the two, so it is off where torch rounds in one of them only.
        searches_convolutions: torch.backends.cudnn.benchmark was on.
        cuda_graphs: the session is recorded in a CUDA graph.
        flushes_denormals: this thread takes numbers that are too small for a full exponent as zeros, and so do the
            threads of the session. Constants are folded in that way.
    """

    graph_optimization: GraphOptimization
    intra_op_num_threads: int
    provider_options: tuple[tuple[str, str], ...]
    session_options: tuple[tuple[str, str | int | bool], ...]
    deterministic: bool
    tf32: bool
    searches_convolutions: bool
    cuda_graphs: bool
    flushes_denormals: bool


@dataclass(frozen=True)
class CacheOptions:
    """Read by cache/disk.py; they do not change the compiled graph, so no key contains them.

    Attributes:
        disk_cache: store compiled graphs for later processes; None uses the environment variable ORT_DYNAMO_CACHE,
            which is on unless it is 0.
        cache_dir: the folder; None uses ORT_DYNAMO_CACHE_DIR, or else the user's cache folder of the platform.
        trace_cache: let torch also store AOTAutograd's results, in its own folder, and unpickle them; None uses
            ORT_DYNAMO_TRACE_CACHE, or else decides by the gain (listeners/trace_cache.py).
    """

    disk_cache: bool | None = None
    cache_dir: str | None = None
    trace_cache: bool | None = None

    def __post_init__(self) -> None:
        for name in ("disk_cache", "trace_cache"):
            if getattr(self, name) is not None:
                is_bool(name, getattr(self, name))
        object.__setattr__(self, "cache_dir", checked_path("cache_dir", self.cache_dir))


@dataclass(frozen=True)
class DumpOptions:
    """Read by listeners/save_files.py, by the stages that run passes (verify) and that run graphs (verify_…).

    Attributes:
        save_onnx: a folder that receives every compiled graph as an ONNX file; None writes nothing.
        verify: check graphs after each pass, and each model with onnx.checker before it is opened.
        verify_values: run each graph node by node the first time, and compare results with fake values.
        verify_sessions: run each session beside one of the CPU without optimizers, and compare their results.
    """

    save_onnx: str | None = None
    verify: bool = False
    verify_values: bool = False
    verify_sessions: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "save_onnx", checked_path("save_onnx", self.save_onnx))
        is_bool("verify", self.verify)
        is_bool("verify_values", self.verify_values)
        is_bool("verify_sessions", self.verify_sessions)


@dataclass(frozen=True)
class VerifyOptions:
    """Read by backend.py: `verified_calls` calls of each graph are checked against eager mode. Enters no key."""

    verified_calls: int | None = None

    def __post_init__(self) -> None:
        is_count("verified_calls", self.verified_calls)


@dataclass(frozen=True)
class Options:
    """All options, one group per stage."""

    segment: SegmentOptions = field(default_factory=SegmentOptions)
    passes: PassOptions = field(default_factory=PassOptions)
    recompute: RecomputeOptions = field(default_factory=RecomputeOptions)
    session: SessionOptions = field(default_factory=SessionOptions)
    dump: DumpOptions = field(default_factory=DumpOptions)
    verify: VerifyOptions = field(default_factory=VerifyOptions)
    cache: CacheOptions = field(default_factory=CacheOptions)

    @property
    def replaces_refused_models(self) -> bool:
        """True if torch runs the nodes of a refused model; False if the program's settings may be the cause."""
        return self.segment.fallback == "eager" and not (self.session.session_options or self.session.provider_options)

    def without_cuda_graphs(self) -> Options:
        """Return the same options, with no graph recorded in a CUDA graph: a replay shows none of its values."""
        return dataclasses.replace(self, session=dataclasses.replace(self.session, cuda_graphs=False))


MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "debug": {"debug": {"verify": True, "verify_values": True}, "graph_optimization": "disable"},
    "reduce-overhead": {"cuda_graphs": True},
}
"""Name of a mode -> the options that it sets."""


def parse_options(mode: str | None, options: Mapping[str, Any] | None) -> Options:
    """Give the options that `mode` and then `options` ask for.

    Args:
        mode: one of MODES, or None for "default".
        options: option name -> value (`python -m ort_dynamo help options`), e.g. {"fallback": "error"}.

    Raises:
        UnknownModeError, UnknownOptionError: with the nearest known name.
        InvalidOptionError: a value that the option cannot take.
    """
    if mode is not None and mode not in MODES:
        raise UnknownModeError(name=mode, nearest=nearest(str(mode), MODES), known=", ".join(MODES))
    if options is not None and not isinstance(options, Mapping):
        raise InvalidOptionError(name="options", value=options, expected="a dict")
    given = read_options(options or {})
    try:
        return make_options({**read_options(MODES[mode or "default"]), **given})
    except InvalidOptionError as error:
        field = str(error.facts["name"])
        if field in (options or {}):
            raise
        raise InvalidOptionError(**{**error.facts, "name": public_name(field)}) from error


def make_options(fields: Mapping[str, Any]) -> Options:
    """Give the options with some fields of groups, as ORTModule and ORTTrainer name most of them.

    Raises:
        UnknownOptionError: no group has such a field.
        InvalidOptionError: a value that the field cannot take.
    """
    groups = {f.name: f.default_factory for f in dataclasses.fields(Options)}
    owner = {f.name: group for group, cls in groups.items() for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for name in fields:
        if name not in owner:
            raise UnknownOptionError(name=name, nearest=nearest(str(name), owner), known=", ".join(sorted(owner)))
    chosen = {
        group: cls(**{name: value for name, value in fields.items() if owner[name] == group})  # type: ignore[operator]
        for group, cls in groups.items()
    }
    return Options(**chosen)


_LEVELS: Mapping[int, GraphOptimization] = {0: "disable", 1: "basic", 2: "extended", 3: "all", 99: "all"}
"""onnxruntime.GraphOptimizationLevel, as integers."""
