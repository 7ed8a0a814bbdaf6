"""The parts of an explanation, as plain values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["PLACES", "Call", "Graph", "Island", "Measured", "OnnxNode", "Operator", "PassRun", "Role", "Saved", "plain"]

PLACES = ("native", "chosen", "eager", "by_design", "free")
"""The places where an operator runs: in ONNX Runtime; in torch by choice, as a fallback or by design; or it computes
nothing, such as a view that torch makes."""


@dataclass(frozen=True)
class Operator:
    """One operator of a compiled graph.

    Attributes:
        name: the FX node's name.
        overload: the ATen overload, as text.
        place: where it runs, one of PLACES.
        reason: why torch runs it; "" where ONNX Runtime does.
        change: the option or call that changes where it runs; "" if there is none.
        line: the user's line that it comes from.
        module: path of the innermost module that called it; "" outside of modules.
        kind: that module's class; "" outside of modules.
        island: the island that has it; "" outside of islands.
        result: dtype and shape of its result, as text.
        nbytes: bytes of its result; symbolic sizes by their examples.
        alive: predicted bytes alive while it runs, inputs and parameters not counted.
        recomputed: the pass that has the backward recompute it; "" if it is not recomputed.
        seconds: measured time of its nodes in one step; None if it was not measured.
    """

    name: str
    overload: str
    place: str
    reason: str
    change: str
    line: str
    module: str
    kind: str
    island: str
    result: str
    nbytes: int
    alive: int
    recomputed: str = ""
    seconds: float | None = None


@dataclass(frozen=True)
class PassRun:
    """One run of one pass.

    Attributes:
        name: its class.
        parameters: its parameters, as text.
        on: the graph: "joint and halves", "forward", "backward", "inference" or an island's name.
        modified: whether it changed the graph.
        before, after: nodes of the graph; both 0 if nobody counted.
        seconds: how long it took.
        summary: the pass's account of its changes; "" for most.
        operators: (operator, nodes before, nodes after) of each operator whose number of nodes it changed.
    """

    name: str
    parameters: str
    on: str
    modified: bool
    before: int
    after: int
    seconds: float
    summary: str = ""
    operators: tuple[tuple[str, int, int], ...] = ()


@dataclass(frozen=True)
class OnnxNode:
    """The measured time of one ONNX node.

    Attributes:
        name: its name in the session.
        op_type: its operator.
        operator: the FX node that it was lowered from; "" if it is not known.
        seconds: median time in one step.
    """

    name: str
    op_type: str
    operator: str
    seconds: float


@dataclass(frozen=True)
class Island:
    """One part of a graph that a session of ONNX Runtime runs.

    Attributes:
        name: its name in the graph.
        key: how errors and saved files call it.
        covers: the modules that it has.
        operators: how many ATen operators it has.
        onnx_nodes: ONNX nodes of its model as it is opened, by operator type.
        casts: ONNX casts, by the dtypes that they cast to.
        nbytes: bytes of its model; parameters are not part of it.
        source: "memory", "disk" or "built".
        miss: why it was built; "" where a cache had it.
        stored_at: its key in the cache on disk; "" where that does not hold it.
        seconds: time to build and open it, or to find it.
        stages: stage of its build -> seconds, also where it was built before.
        measured: median seconds of a run; None if it was not measured.
        nodes: its ONNX nodes with their times, if they were measured.
    """

    name: str
    key: str
    covers: str
    operators: int
    onnx_nodes: Mapping[str, int]
    casts: Mapping[str, int]
    nbytes: int
    source: str
    miss: str
    stored_at: str
    seconds: float
    stages: Mapping[str, float]
    measured: float | None = None
    nodes: tuple[OnnxNode, ...] = ()


@dataclass(frozen=True)
class Saved:
    """One tensor that the forward saves for the backward.

    Attributes:
        name: its FX node.
        operator: the operator that made it.
        module: path of the module that called that.
        kind: the module's class.
        line: the user's line.
        result: dtype and shape, as text.
        nbytes: its bytes.
    """

    name: str
    operator: str
    module: str
    kind: str
    line: str
    result: str
    nbytes: int


@dataclass(frozen=True)
class Role:
    """One compiled graph: a forward, a backward, or a graph without gradients.

    Attributes:
        name: "forward", "backward", "inference" or "training".
        operators: its operators, in AOTAutograd's order.
        islands: its islands, in the order in which they run.
        passes: the passes on this graph and on the models of its islands.
        casts: "float32 to bfloat16" -> ATen casts.
        peak: predicted most bytes alive, inputs and parameters not counted.
        seconds: the time of its compile.
        measured: median seconds of its sessions; None if they were not measured.
    """

    name: str
    operators: tuple[Operator, ...]
    islands: tuple[Island, ...]
    passes: tuple[PassRun, ...]
    casts: Mapping[str, int]
    peak: int
    seconds: float
    measured: float | None = None

    def count(self, place: str) -> int:
        """Count the operators that run in one of PLACES."""
        return sum(one.place == place for one in self.operators)


@dataclass(frozen=True)
class Graph:
    """One of Dynamo's graphs, compiled.

    Attributes:
        function: the function or module that it is of, with its file and line.
        compile_id: torch's name for the compile.
        roles: forward and backward, or one graph without gradients.
        passes: the passes on the joint graph, and on forward and backward before they are compiled.
        saved: tensors that the forward saves for the backward, most bytes first.
        nbytes_without: bytes that would be saved if nothing were recomputed.
        recomputed: "pass: operator" -> recomputed operators.
        recompute_time: estimated time of these, as a share of the forward's.
        stages: stage of the compile -> seconds.
    """

    function: str
    compile_id: str
    roles: tuple[Role, ...]
    passes: tuple[PassRun, ...]
    saved: tuple[Saved, ...]
    nbytes_without: int
    recomputed: Mapping[str, int]
    recompute_time: float
    stages: Mapping[str, float]

    @property
    def pass_runs(self) -> tuple[PassRun, ...]:
        """The runs of passes on all of its graphs and models."""
        return (*self.passes, *(run for role in self.roles for run in role.passes))

    @property
    def saved_bytes(self) -> int:
        """Bytes that the forward saves for the backward."""
        return sum(one.nbytes for one in self.saved)

    @property
    def peak(self) -> int:
        """Predicted most bytes alive, inputs and parameters not counted."""
        return max(role.peak for role in self.roles)


@dataclass(frozen=True)
class Call:
    """A call of the forward of one of Dynamo's graphs, or of its graph without gradients.

    Attributes:
        graph: its index.
        saved: bytes that the call saves for the backward, without those that an earlier call of the step saves.
    """

    graph: int
    saved: int


@dataclass(frozen=True)
class Measured:
    """Times and bytes of some steps.

    Attributes:
        steps: how many steps were timed.
        forward: median seconds of a call.
        backward: median seconds of its backward; None without gradients.
        sessions: median seconds of a step inside of sessions.
        peak: most bytes of one step in ONNX Runtime's arena, or on CUDA in torch's memory; None if it is not known.
        peak_of: whose memory `peak` is.
        by_type: ONNX operator type -> seconds of a step.
    """

    steps: int
    forward: float
    backward: float | None
    sessions: float
    peak: int | None
    peak_of: str
    by_type: Mapping[str, float] = field(default_factory=dict)

    @property
    def step(self) -> float:
        """Seconds of forward and backward."""
        return self.forward + (self.backward or 0.0)


def plain(value: Any) -> Any:
    """Return a value as JSON has it: dataclasses and mappings as dicts, sequences as lists, others as text."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {one.name: plain(getattr(value, one.name)) for one in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, (tuple, list, set, frozenset)):
        return [plain(one) for one in value]
    return str(value)
