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

__all__ = ["CheckedCalls"]

_log = logging.getLogger(__name__)  # TORCH_LOGS=ort_dynamo shows it


class CheckedCalls:
    """Checks the first calls of a compiled graph, each on copies of its inputs.

    Attributes:
        recorder: a listener of the compile.

    Args:
        gm: Dynamo's graph.
        calls: how many calls are checked.
        names: of its inputs.
    """

    def __init__(self, gm: GraphModule, calls: int, names: tuple[str, ...]) -> None:
        self.recorder: Recorder = Recorder()
        self._gm: GraphModule | None = gm
        self._calls, self._names = calls, names
        self._checked = 0

    def of(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function like the compiled graph, which raises ResultsDifferError where a call differs."""

        def call(*inputs: Any) -> Any:
            if self._gm is not None:
                self._check(self._gm, compiled, inputs)
            return compiled(*inputs)

        return call

    def _check(self, gm: GraphModule, compiled: Callable[..., Any], inputs: tuple[Any, ...]) -> None:
        self._checked += 1
        step = Step(inputs, names=self._names)
        try:
            result = check(step, gm, compiled, self.recorder, Path(FOLDER))
        finally:
            if self._checked == self._calls:
                self._gm = None
                self.recorder.close()
        result.raise_if_wrong()
        _log.info("ort_train: call %d of %d: %s", self._checked, self._calls, result)
