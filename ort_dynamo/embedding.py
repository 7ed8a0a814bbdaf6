"""The surface for front ends that build on the backend, such as ORTModule and ORTTrainer (docs/internals/embedding.md).

Beside it, a front end imports the errors and the names of the package itself, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from ort_dynamo.backend import compile_recorded, compile_step, ort_train
from ort_dynamo.capture.whole_graphs import capture_gradients, capture_whole
from ort_dynamo.graph.dtypes import onnx_dtype, onnx_tensor
from ort_dynamo.graph.marks import OBSERVERS
from ort_dynamo.graph.model_files import write_bytes, write_model
from ort_dynamo.lowering.registry import named_lowering
from ort_dynamo.options.groups import Options, PassOptions, make_options, parse_options
from ort_dynamo.options.json_file import read_json
from ort_dynamo.options.spelling import nearest
from ort_dynamo.program.program_warning import warn_program
from ort_dynamo.report.node_counts import FALLBACK, NodeCounts
from ort_dynamo.report.notes import FunctionNote, at_limit, break_note, given_up
from ort_dynamo.report.reasons import in_a_line
from ort_dynamo.report.record import CompileRecord
from ort_dynamo.runtime.boxed import RunWatch
from ort_dynamo.runtime.installed.capabilities import installed_runtime
from ort_dynamo.runtime.installed.importing import onnxruntime
from ort_dynamo.runtime.observe.model_file import optimized_model, run_model
from ort_dynamo.saving.one_model import join_models
from ort_dynamo.saving.program import Program, read_program
from ort_dynamo.saving.whole_graph import at_opset, export_graph
from ort_dynamo.targets.target import OPSET
from ort_dynamo.torch_internals.tracing.frames import frames

__all__ = [
    "FALLBACK",
    "FALLBACK_LOG",
    "OBSERVERS",
    "OPSET",
    "CompileRecord",
    "FunctionNote",
    "Gaps",
    "Options",
    "PassOptions",
    "Program",
    "RunWatch",
    "at_opset",
    "capture_gradients",
    "capture_whole",
    "compile_recorded",
    "compile_step",
    "count_places",
    "export_graph",
    "find_gaps",
    "forget_compiles",
    "in_a_line",
    "installed_runtime",
    "join_models",
    "make_options",
    "named_lowering",
    "nearest",
    "onnx_dtype",
    "onnx_tensor",
    "onnxruntime",
    "parse_options",
    "read_json",
    "read_program",
    "run_model",
    "warn_program",
    "write_model",
    "write_optimized",
]


FALLBACK_LOG = "ort_dynamo.report.counts"
"""Name of the logger that warns of each fallback, in words that hold FALLBACK."""


def forget_compiles() -> None:
    """Forget the compiles of this process, as torch._dynamo.reset() asks a backend to."""
    ort_train.reset()  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Gaps:
    """The places where Python runs in the midst of a program that is compiled.

    Attributes:
        breaks: graph breaks, each with its reason.
        skipped: functions that Dynamo gave up on, whose own code runs in eager.
    """

    breaks: tuple[FunctionNote, ...]
    skipped: tuple[FunctionNote, ...]


def find_gaps(since: float) -> Gaps:
    """Find the gaps in Dynamo's compiles that began at or after `since` (seconds since the epoch), of any backend."""
    seen = frames(since)
    breaks = (break_note(frame, ended) for frame in seen for ended in frame.breaks)
    return Gaps(tuple(breaks), (*given_up(seen), *at_limit(seen)))


def count_places(records: Sequence[CompileRecord]) -> str:
    """Count in a line the nodes of some compiles by who runs them; empty where they have no graphs."""
    graphs = [graph for record in records for graph in record.graphs]
    return str(NodeCounts.of(graphs)) if graphs else ""


def write_optimized(model: ir.Model, path: Path) -> None:
    """Write a model as ONNX Runtime's optimizers leave it for this machine's CPU.

    Raises:
        SessionError: ONNX Runtime cannot take it.
        OSError: the file cannot be written.
    """
    write_bytes(optimized_model(ir.to_proto(model).SerializeToString()), path)
