"""The log of a first run: which features are on, and how long it took to compile."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from importlib.metadata import version

from ort_dynamo.embedding import CompileRecord, FunctionNote, count_places, installed_runtime
from ort_dynamo.training.ortmodule.environment import Settings
from ort_dynamo.training.ortmodule.fallback import _FallbackPolicy
from ort_dynamo.training.ortmodule.logger import LogLevel, rank_and_world_size

__all__ = ["FirstRun", "log_first_run"]

_LEVELS = {1: "TRANSFORMER_LAYERWISE_RECOMPUTE", 2: "TRANSFORMER_LAYERWISE_RECOMPUTE_WITH_COMPROMISE"}


@dataclasses.dataclass(frozen=True)
class FirstRun:
    """A call that compiled graphs.

    Attributes:
        mode: "training" or "inference".
        records: the records of the compiles, in order.
        seconds: the time of the whole call.
        pieces: graph breaks and functions that Dynamo skipped.
    """

    mode: str
    records: Sequence[CompileRecord]
    seconds: float
    pieces: Sequence[FunctionNote]


def log_first_run(logger: logging.Logger, level: LogLevel, settings: Settings, run: FirstRun) -> None:
    """Log which features are on and how long compiling took; in several processes rank 0 does."""
    rank, _ = rank_and_world_size()
    if rank:
        return
    runtime = installed_runtime()
    rows = _rows(settings, run)
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    lines = [
        "***** ONNX Runtime Training (ORTModule) is accelerating your model *****",
        "",
        f"ORTModule is enabled with following features ON/OFF for [{run.mode}] mode:",
        "",
        *(f"{row[0]:<{widths[0]}} : {row[1]:<{widths[1]}} : {row[2]}" for row in rows),
        "",
        *_times(run, detailed=level < LogLevel.WARNING),
        f"Versions: {runtime.package} - {runtime.version}, ONNX - {version('onnx')}",
        "************************************************************************",
    ]
    logger.warning("\n%s\n", "\n".join(lines))


def _rows(settings: Settings, run: FirstRun) -> list[tuple[str, str, str]]:
    places = count_places(run.records)
    nodes = f"Nodes: {places}" if places else "Graphs that were compiled before, of a module like this one, serve again"
    policy = settings.fallback_policy
    level = settings.memory_optimization_level
    plan = settings.memory_optimizer_config
    memory = (
        f"Memory Optimization Level: [{_LEVELS.get(level, 'USER_SPECIFIED')}], Optimization Config: [{plan}]"
        if level or plan
        else "Enable with env ORTMODULE_MEMORY_OPT_LEVEL=1/2 or ORTMODULE_MEMORY_OPT_CONFIG=<config.json>"
    )
    return [
        ("ATen Executor", "ON", nodes),
        (
            "Auto Fallback",
            _on(policy is not _FallbackPolicy.FALLBACK_DISABLE),
            "Fallback to PyTorch when encountering unsupported ops",
        ),
        (
            "Cast Propagation",
            _on(settings.propagate_cast_ops_level > 0),
            f"Level {settings.propagate_cast_ops_level} enabled",
        ),
        ("Custom Function", "ON", "Support custom torch.autograd.Function, as Dynamo traces it"),
        ("Memory Optimizer", _on(bool(level or plan)), memory),
        ("Online Op Tuning", _on(settings.enable_tuning), "Enable with env ORTMODULE_ENABLE_TUNING=1, on CUDA"),
        *(("Runs in pieces", "ON", str(piece)) for piece in run.pieces),
    ]


def _on(value: bool) -> str:
    return "ON" if value else "OFF"


def _times(run: FirstRun, *, detailed: bool) -> list[str]:
    """Return the report of ORTModule's phases: capture, lowering and passes, sessions."""
    islands = [island for record in run.records for graph in record.graphs for island in graph.islands]
    built = sum(sum(i.build.seconds.values()) for i in islands if not i.was_cached)
    opened = sum(i.seconds for i in islands) - built
    export = run.seconds - built - opened
    lines = [f"Total ORT initialization overhead is {run.seconds:.2f}s where export takes {export:.2f}s."]
    if detailed:
        details = f"graph building takes {built:.2f}s, session creation takes {opened:.2f}s"
        lines.append(f"Other overhead details: {details}")
    return [*lines, ""]
