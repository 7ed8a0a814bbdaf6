"""What became of each graph: counted in torch._dynamo's counters, and said once per reason until Dynamo is reset."""

from __future__ import annotations

import logging

from ort_dynamo.segment.segment import Segmented
from ort_dynamo.torch_internals.dynamo import counters

__all__ = ["report", "say_again"]

_log = logging.getLogger(__name__)  # TORCH_LOGS=ort_dynamo shows all of it
_said: set[tuple[str, str]] = set()


def report(segmented: Segmented, role: str) -> None:
    """Count the graph and its nodes by where they run, and warn about eager ones not warned about before.

    Counters (torch._dynamo.utils.counters): "ort_train" -> graphs, islands, native_nodes, eager_nodes;
    "ort_train_native" -> "<target>" -> nodes; "ort_train_by_design" -> "<target>" -> nodes that torch runs by design;
    "ort_train_eager" -> "<target>: <reason>" -> nodes.
    """
    counts = counters["ort_train"]
    counts["graphs"] += 1
    counts["islands"] += len(segmented.islands)
    native = segmented.native.total()
    counts["native_nodes"] += native
    counters["ort_train_native"].update(segmented.native)
    counters["ort_train_by_design"].update(segmented.by_design)
    counts["eager_nodes"] += len(segmented.eager)
    for node in segmented.eager:
        counters["ort_train_eager"][f"{node.target}: {node.reason}"] += 1
        if (node.target, node.reason) not in _said:
            _said.add((node.target, node.reason))
            _log.warning(
                "%s runs in eager, not in ONNX Runtime (%s graph): %s\n  %s",
                node.target,
                role,
                node.reason,
                node.where,
            )
    _log.info(
        "%s graph: %d nodes in %d island(s), %d in eager",
        role,
        native,
        len(segmented.islands),
        len(segmented.eager),
    )


def say_again() -> None:
    """Let warnings that were given come again: what is compiled after a reset is a new program."""
    _said.clear()
