"""The result of a verification: the values that differ, and the first operator that does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ort_dynamo.errors import NotCompiledError, ResultsDifferError
from ort_dynamo.notebook import ShownAsText
from ort_dynamo.verification.compare import Difference

__all__ = ["Choice", "Fault", "Verification"]


@dataclass(frozen=True)
class Fault:
    """The first operator that differs, and the part of ort_train or of ONNX Runtime that is wrong.

    Attributes:
        operator: the ATen operator, such as "aten.gelu.default"; "" where the fault is in no single one.
        node: its node in the graph, such as "gelu_5".
        graph: "forward", "backward", "inference" or "training"; "joint" where it is in no single node of a graph that a
            pass has changed before it is cut.
        module: the module that calls it, or whose gradient it computes, such as "layers.5.act (GELU)"; "" if none.
        line: the user's line.
        problem: how its result differs from torch's, for equal inputs.
        culprit: "lowering", "kernel", "lowering or kernel", "pass", "optimizer" or "outside", by `cause`.
        cause: the wrong part, in words, with its name.
        onnx_nodes: the ONNX nodes that it became, as text.
        repeat: a Python program that repeats the fault and exits 1 while it stands; "" where there is none.
    """

    operator: str
    node: str
    graph: str
    module: str
    line: str
    problem: str
    culprit: str
    cause: str
    onnx_nodes: tuple[str, ...] = ()
    repeat: str = ""

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        if self.operator:
            yield f"The first operator that differs: {self.operator} ({self.node} in the {self.graph} graph)"
            if self.module:
                yield f"  module: {self.module}"
            yield f"  line: {self.line}"
        else:
            yield f"The first difference is in the {self.graph} graph"
        yield f"  difference: {self.problem}"
        yield f"  cause: {self.cause}"
        if self.onnx_nodes:
            yield "  ONNX nodes:"
            yield from (f"    {node}" for node in self.onnx_nodes[:_NODES])
            if len(self.onnx_nodes) > _NODES:
                yield f"    and {len(self.onnx_nodes) - _NODES} more"
        if self.repeat:
            yield f"  repeat it alone: python {self.repeat}"


_NODES = 8
"""Number of ONNX nodes that the text lists."""

_VALUES = 8
"""Number of values that the text lists."""


@dataclass(frozen=True)
class Choice:
    """An operator that chose other elements than torch, of equal ones, as an operator may (torch leaves this open).

    Attributes:
        operator: the ATen operator, such as "aten.topk.default".
        node: its node in the graph.
        graph: "forward", "backward", "inference" or "training".
        line: the user's line.
    """

    operator: str
    node: str
    graph: str
    line: str

    def __str__(self) -> str:
        return f"{self.operator} ({self.node} in the {self.graph} graph): {self.line}"


@dataclass(frozen=True, repr=False)
class Verification(ShownAsText):
    """The result of `verify`; its str and repr are a screen of text.

    Attributes:
        compared: number of values that were compared: outputs, gradients, buffers and inputs.
        graphs: number of graphs that ort_train compiled for the step.
        differences: the values that differ from eager's by more than rounding.
        fault: the first operator that differs; None where nothing does, or where no operator was found.
        choices: operators that chose others of equal elements than torch did, such as the indices of a top-k with
            ties. The differences follow from them, if there is no fault.
    """

    compared: int
    graphs: int
    differences: tuple[Difference, ...]
    fault: Fault | None = None
    choices: tuple[Choice, ...] = ()

    @property
    def ok(self) -> bool:
        """True if nothing differs, or only what follows from `choices`."""
        return not self.differences or bool(self.choices)

    def raise_if_wrong(self) -> None:
        """Raise ResultsDifferError with this text if something differs, NotCompiledError if nothing was compiled."""
        if not self.ok:
            raise ResultsDifferError(text=str(self))
        if not self.graphs:
            raise NotCompiledError(name="The call", reasons=_NO_GRAPH)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        graphs = f"{self.graphs} graph{'' if self.graphs == 1 else 's'} of ort_train"
        if not self.graphs:
            yield f"Nothing was compiled:{_NO_GRAPH}"
            yield _NO_GRAPH_ADVICE
            if not self.differences:
                return
        if not self.differences:
            yield f"Equal to eager mode: {self.compared} values, from {graphs}"
            return
        yield f"{len(self.differences)} of {self.compared} values differ from eager mode, from {graphs}:"
        yield from (f"  {one}" for one in self.differences[:_VALUES])
        if len(self.differences) > _VALUES:
            yield f"  and {len(self.differences) - _VALUES} more"
        if self.choices:
            yield _CHOICES
            yield from (f"  {one}" for one in self.choices[:_VALUES])
        else:
            yield str(self.fault) if self.fault else _NO_OPERATOR


_NO_GRAPH = " torch.compile found no graph in this call, so all of it ran in eager mode"

_NO_GRAPH_ADVICE = (
    "So ort_train was not checked. Print ort_dynamo.explain(model, ...) with the same arguments: it says why."
)

_CHOICES = (
    "This is no fault: elements are equal, and torch leaves open which of them an operator chooses. These operators "
    "chose others than torch did, and each operator and each session is right for its own inputs:"
)

_NO_OPERATOR = (
    "No operator, pass or session differs by itself. Each graph, run by torch, has the results of ort_train: the cause "
    "is before the graphs, in Dynamo's or AOTAutograd's trace, which backend='aot_eager' shows, or in a pass on FX "
    "graphs: ort_dynamo.verify names it, and the option verify does not."
)
