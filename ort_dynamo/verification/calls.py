"""Checks the first calls of a compiled graph against eager mode, before they run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.fx import GraphModule

from ort_dynamo.verification.check import check
from ort_dynamo.verification.record import Recorder
from ort_dynamo.verification.repeat import FOLDER
from ort_dynamo.verification.step import Step

__all__ = ["check_calls"]

_log = logging.getLogger(__name__)  # TORCH_LOGS=ort_dynamo shows it


def check_calls(
    gm: GraphModule, compiled: Callable[..., Any], recorder: Recorder, calls: int, names: tuple[str, ...]
) -> Callable[..., Any]:
    """Have the first calls of a compiled graph checked, each on copies of its inputs.

    Args:
        gm: Dynamo's graph.
        compiled: the same, compiled with `recorder` among the listeners.
        recorder: records what runs when it is asked to.
        calls: how many are checked.
        names: of its inputs.

    Returns:
        A function like `compiled`, which raises ResultsDifferError where a call differs.
    """
    checked = 0

    def call(*inputs: Any) -> Any:
        nonlocal checked
        if checked < calls:
            checked += 1
            result = check(Step(inputs, names=names), gm, compiled, recorder, Path(FOLDER))
            result.raise_if_wrong()
            _log.info("ort_train: call %d of %d: %s", checked, calls, result)
        return compiled(*inputs)

    return call
