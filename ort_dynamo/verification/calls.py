"""Checks the first calls of a compiled graph against eager mode, before they run."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from ort_dynamo.program.program_warning import warn_program
from ort_dynamo.torch_internals.fakes import storage_identity
from ort_dynamo.torch_internals.pytree import tree_leaves, tree_map
from ort_dynamo.verification.check import check
from ort_dynamo.verification.copies import UncheckableError
from ort_dynamo.verification.record import Recorder
from ort_dynamo.verification.repeat import FOLDER
from ort_dynamo.verification.step import Step

__all__ = ["CheckedCalls"]

_log = logging.getLogger(__name__)  # TORCH_LOGS=ort_dynamo shows it


class CheckedCalls:
    """Checks the first calls of a compiled graph, each on copies of its inputs; what else it writes to is put back.

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
        try:
            held = _held(gm, inputs)
            step = Step(inputs, names=self._names, held=held)
            result = check(step, gm, _keeping_lists(compiled), self.recorder, Path(FOLDER))
        except UncheckableError as reason:
            warn_program(f"ort_train: the option verify leaves a call unchecked: {reason}. The call runs as usual.")
            return
        finally:
            if self._checked == self._calls:
                self._gm = None
                self.recorder.close()
        result.raise_if_wrong()
        _log.info("ort_train: call %d of %d: %s", self._checked, self._calls, result)


def _held(gm: GraphModule, inputs: tuple[Any, ...]) -> dict[str, torch.Tensor]:
    """Find the tensors that a graph holds itself, such as the parameters of an optimizer.

    Raises:
        UncheckableError: one of them shares memory with an input, whose copy is elsewhere.
    """
    held = {**dict(gm.named_parameters()), **dict(gm.named_buffers())}
    for prefix, module in gm.named_modules():
        if isinstance(module, GraphModule):
            for node in module.graph.find_nodes(op="get_attr"):
                one = operator.attrgetter(node.target)(module)
                if isinstance(one, torch.Tensor):
                    held.setdefault(f"{prefix}.{node.target}" if prefix else node.target, one)
    places = {storage_identity(one) for one in tree_leaves(inputs) if _has_memory(one)}
    if any(storage_identity(one) in places for one in held.values() if _has_memory(one)):
        raise UncheckableError("an input shares memory with a tensor that the graph holds itself")
    return held


def _has_memory(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and value.untyped_storage().nbytes() > 0


def _keeping_lists(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Give a compiled graph lists of its own: it empties those that it takes its inputs from."""
    return lambda *inputs: compiled(*tree_map(lambda leaf: leaf, inputs))
