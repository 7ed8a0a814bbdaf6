"""Count the placement of each graph's nodes in torch._dynamo's counters, and log each reason once per Dynamo reset."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Sequence

from ort_dynamo.program.asked_settings import BACKEND
from ort_dynamo.program.progress import is_shown
from ort_dynamo.report.node_counts import BY_CHOICE, BY_DESIGN, FALLBACK, NodeCounts, spoken
from ort_dynamo.report.notes import note
from ort_dynamo.report.reasons import in_a_line, is_recurrent, limit_reason
from ort_dynamo.report.record import RECORDS, GraphRecord
from ort_dynamo.segment.segment import EagerNode
from ort_dynamo.torch_internals.tracing.dynamo import counters
from ort_dynamo.torch_internals.tracing.frames import Frame

__all__ = ["report", "report_first", "report_left_out", "report_not_recorded", "reset_messages"]

_log = logging.getLogger(__name__)  # TORCH_LOGS=ort_dynamo shows all of it
_said: set[tuple[str, str]] = set()


def _is_new(message: tuple[str, str]) -> bool:
    """Note a message, and check whether it is the first of its kind since Dynamo was reset."""
    is_new = message not in _said
    _said.add(message)
    return is_new


def report(graph: GraphRecord) -> None:
    """Count a graph and its nodes by where they run, and log each message that is new since Dynamo was reset.

    Fallbacks are warnings; operators of a graph that have one reason share one. The first graph that torch runs mostly
    by choice is one, too.

    Counters (torch._dynamo.utils.counters): "ort_train" -> graphs, islands, native_nodes, chosen_nodes,
    eager_nodes;
    "ort_train_native" -> "<target>" -> nodes; "ort_train_by_design" -> "<target>" -> nodes that torch runs by design;
    "ort_train_chosen" and "ort_train_eager" -> "<target>: <reason>" -> nodes that torch runs by choice, or must run.
    """
    counts = counters["ort_train"]
    counts["graphs"] += 1
    counts["islands"] += len(graph.islands)
    counts["native_nodes"] += graph.native.total()
    counters["ort_train_native"].update(graph.native)
    counters["ort_train_by_design"].update(graph.by_design)
    counts["chosen_nodes"] += graph.chosen.total()
    counters["ort_train_chosen"].update(graph.chosen)
    counts["eager_nodes"] += len(graph.eager)
    new: dict[str, list[EagerNode]] = {}
    for node in graph.eager:
        counters["ort_train_eager"][f"{node.target}: {node.reason}"] += 1
        if _is_new((node.target, node.reason)):
            new.setdefault(node.reason, []).append(node)
    for reason, nodes in new.items():
        _warn_of(nodes, reason, graph.role)
    _say_choice(graph.role, graph.native.total(), graph.chosen)
    _log.info("%s graph, %d island(s): %s", graph.role, len(graph.islands), NodeCounts.of([graph]))
    for reason, count in graph.chosen.items():
        _log.info("%s: %d x %s", BY_CHOICE, count, reason)


def _warn_of(nodes: Sequence[EagerNode], reason: str, role: str) -> None:
    """Warn of fallbacks of different operators that have one reason; the first warning says what to do."""
    names, more = [node.target for node in nodes[:_NAMES]], len(nodes) - _NAMES
    operators = ", ".join(names) if more <= 0 else f"{', '.join(names)} and {more} other{'s' if more > 1 else ''}"
    lines = list(dict.fromkeys(node.where for node in nodes))[:_NAMES]
    if _is_new(_ADVICE):
        lines.append(_ADVICE[0])
    _log.warning(
        "ort_train: %s %s %s, not in ONNX Runtime, in the %s graph: %s\n  %s",
        operators,
        "runs" if len(nodes) == 1 else "run",
        FALLBACK,
        role,
        reason,
        "\n  ".join(lines),
    )


_ADVICE = ("Results stay right, since torch runs it. To change it: python -m ort_dynamo help troubleshooting", "")

_NAMES = 4
"""Operators, and lines of the program, that a warning names."""


def _say_choice(role: str, native: int, chosen: Counter[str]) -> None:
    """Log once that torch runs most of a graph by choice: most nodes that a session could run."""
    if chosen.total() <= native or not _is_new(_CHOICE):
        return
    _log.warning(
        "ort_train: torch runs %d of %d operators of the %s graph by choice, since it is faster (%s). "
        'Set options={"placement": "onnxruntime"} to run them in ONNX Runtime.',
        chosen.total(),
        native + chosen.total(),
        role,
        _cause(chosen),
    )


_CHOICE = ("torch's choice", "")


def _cause(chosen: Counter[str]) -> str:
    """Return the entry of a convolution, which decides about the nodes around it; else the most frequent one."""
    return min(chosen, key=lambda entry: (not entry.startswith("aten.convolution"), -chosen[entry]))


def report_not_recorded(role: str, reason: str) -> None:
    """Count and say that a graph runs without a CUDA graph, though that was asked for; not if there is no reason.

    Counter: "ort_train_not_recorded" -> "<role>: <reason>" -> graphs.
    """
    if not reason:
        return
    counters["ort_train_not_recorded"][f"{role}: {reason}"] += 1
    if _is_new((role, reason)):
        _log.warning("ort_train: a %s graph runs without a CUDA graph: %s", role, reason)


def report_first(graphs: Sequence[GraphRecord]) -> None:
    """Log once how much of the compiled graphs runs in ONNX Runtime, and why not more: on the terminal, and at INFO."""
    if not _is_new(_FIRST):
        return
    places = NodeCounts.of(graphs)
    native, design, chosen = places.native.total(), places.by_design.total(), places.chosen.total()
    eager = places.eager_nodes
    rest = [
        f"{chosen} {BY_CHOICE}, which options={{'placement': 'onnxruntime'}} changes" if chosen else "",
        f"{eager} {FALLBACK}, as the warnings say" if eager else "",
        f"{design} {BY_DESIGN} ({_designed(places.by_design)})" if design else "",
    ]
    line = f"ort_train: {native} of {native + design + chosen + eager} operators run in ONNX Runtime"
    line = "; ".join([line, *filter(None, rest), "ort_dynamo.summary() says more"])
    _show(line)


_FIRST = ("the first compile", "")


def _designed(by_design: Counter[str]) -> str:
    names = [spoken(target) for target, _ in by_design.most_common()]
    return ", ".join(names[:2] + ["others"] * (len(names) > 2))


def report_left_out(frame: Frame) -> None:
    """Log once that Dynamo runs a function in eager that this backend should compile.

    It logs functions that reach the recompile limit, and recurrent layers. It logs others only while nothing has been
    compiled, since many programs have functions without tensors. It logs nothing if torch raises the failure, since the
    function does not run then.
    """
    if frame.caller is None or frame.caller.backend != BACKEND or frame.raised:
        return
    left = frame.failure or next(filter(is_recurrent, (reason for reason, _ in frame.breaks)), None)
    if frame.limit:
        said = str(note(frame, limit_reason(frame)))
    elif left and is_recurrent(left):
        runs = " runs in eager" if frame.failure else ""
        said = f"{note(frame, '').name}{runs}: {in_a_line(left)}"
    elif left and not len(RECORDS):
        said = (
            f"{note(frame, '').name} runs in eager, and the functions that it calls may be compiled: {in_a_line(left)}"
        )
    else:
        return
    if _is_new((said, "")):
        _show(f"ort_train: {said}; ort_dynamo.summary() says more")


def _show(line: str) -> None:
    """Log a line at INFO, and print it on a terminal that the log does not go to."""
    _log.info("%s", line)
    if is_shown() and not _log.isEnabledFor(logging.INFO):
        print(line, file=sys.stderr)


def reset_messages() -> None:
    """Let warnings that were given come again: a graph that is compiled after a reset belongs to a new program."""
    _said.clear()
