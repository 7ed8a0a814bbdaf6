"""The inputs and results of building an island, shared by the compiler, the cache and the runtime."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx_ir as ir
import torch
from torch.fx import GraphModule

from ort_dynamo.graph.boundary import ValueSpec
from ort_dynamo.graph.dtypes import ONNX_TO_TORCH
from ort_dynamo.graph.function_key import spell_array
from ort_dynamo.graph.fused_op import FusedOp
from ort_dynamo.options.groups import DumpOptions, SessionSettings
from ort_dynamo.targets.target import Target

__all__ = [
    "BuildRecord",
    "BuildSpec",
    "BuildStage",
    "BuiltGraph",
    "PassRecord",
    "Source",
    "Stage",
    "built_of",
    "spell_pass",
]

Stage = Literal["lowered", "rewritten", "optimized"]
"""Stage of a build at which a model is saved: before any pass, after our passes, after ONNX Runtime's optimizers."""

Source = Literal["memory", "disk", "built"]
"""Origin of an island: one with the same graph key in this process, a stored one, or a build."""

_WHOLE_IN_REPR = (str, bytes, int, float, complex, type(None), Target)


@dataclass(frozen=True)
class BuildSpec:
    """Everything that decides how an island is built; its repr is the context of the graph key.

    `build_island` gets no other settings, so everything that it reads is in the key.

    Attributes:
        passes: the ONNX passes, in order, each identified by its class and parameters.
        session: the settings of the session.
        dump: where the model is written, and whether it is checked: an island that is to be saved is built for that.
        target: the target of the lowering.
        device: the device of the session's tensors.
        in_order: whether the nodes run in AOTAutograd's order (docs/internals/decisions/0005-order-of-a-backward.md).
    """

    passes: tuple[ir.passes.InPlacePass, ...]
    session: SessionSettings
    dump: DumpOptions
    target: Target
    device: torch.device
    in_order: bool

    def __repr__(self) -> str:
        names = (field.name for field in dataclasses.fields(self))
        values = {name: getattr(self, name) for name in names}
        spelled = {
            **{name: repr(value) for name, value in values.items()},
            "passes": "; ".join(map(spell_pass, self.passes)),
        }
        return f"BuildSpec({', '.join(f'{name}={text}' for name, text in spelled.items())})"


def spell_pass(pass_: object) -> str:
    """Return a class with its parameters; those of onnx_ir are no dataclasses and hold theirs as plain attributes.

    The content of arrays and tensors is added: their reprs are short.
    """
    if dataclasses.is_dataclass(pass_):
        text = repr(pass_)
        values = [getattr(pass_, field.name) for field in dataclasses.fields(pass_) if field.repr]
    else:
        text = f"{type(pass_).__module__}.{type(pass_).__qualname__}({vars(pass_)})"
        values = [*vars(pass_).values()]
    return "".join([text, *(f"[{content}]" for content in _contents(values))])


def _contents(values: Iterable[object], seen: set[int] | None = None) -> Iterator[str]:
    """Yield dtype, shape and hash of each array or tensor, also of those in containers and dataclasses."""
    seen = set() if seen is None else seen
    for value in values:
        if isinstance(value, _WHOLE_IN_REPR) or id(value) in seen:
            continue
        seen.add(id(value))
        if type(value) in (torch.Tensor, torch.nn.Parameter) and _has_bytes(value):  # type: ignore[arg-type]
            plain = value.detach().resolve_conj().resolve_neg().cpu().contiguous()  # type: ignore[attr-defined]
            yield f"{plain.dtype}{tuple(plain.shape)}{spell_array(plain.reshape(-1).view(torch.uint8).numpy())}"
        elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
            yield spell_array(value)
        elif isinstance(value, (tuple, list, set, frozenset)):
            yield from _contents(value, seen)
        elif isinstance(value, Mapping):
            yield from _contents(value.values(), seen)
        elif isinstance(value, ir.TensorProtocol):
            yield f"{value.dtype}{spell_array(value.numpy())}"
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield from _contents([getattr(value, field.name) for field in dataclasses.fields(value)], seen)


def _has_bytes(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.device.type != "meta"


@dataclass(frozen=True)
class PassRecord:
    """One run of one pass.

    Attributes:
        name: the pass with its parameters: its repr, or the class name for foreign passes.
        seconds: its time, without checks.
        modified: whether it changed the graph.
        summary: a summary of its changes (CastSummary for PropagateCasts); None for most passes.
        before, after: the number of nodes before and after it. An FX graph's inputs and output count; subgraphs do not.
        operators: (operator, nodes before, nodes after) of each operator whose number of nodes it changed.
    """

    name: str
    seconds: float
    modified: bool
    summary: object | None = None
    before: int = 0
    after: int = 0
    operators: tuple[tuple[str, int, int], ...] = ()


@dataclass(frozen=True)
class BuildRecord:
    """Statistics of building an island.

    Attributes:
        nodes: ONNX nodes of the model before ONNX Runtime has optimized it, sub-graphs not counted.
        passes: the ONNX passes, in order.
        seconds: stage ("lower", "rewrite", "optimize") -> how long it took.
    """

    nodes: int
    passes: tuple[PassRecord, ...]
    seconds: Mapping[str, float]


@dataclass(frozen=True)
class BuildStage:
    """An island at one stage of its build.

    Attributes:
        name: the name of the island in errors and files.
        island: its FX graph.
        stage: "lowered", before any pass; "rewritten", after our passes; "optimized", after ONNX Runtime's optimizers.
        model: the model, while it is no bytes.
        serialised: gives its bytes. They are made at each call, where nothing else needs them.
    """

    name: str
    island: GraphModule
    stage: Stage
    model: ir.Model | None
    serialised: Callable[[], bytes]


@dataclass(frozen=True)
class BuiltGraph:
    """A compiled island as it can be stored: bytes and plain values, no session.

    Attributes:
        name: its name in errors and files, such as "forward-1f0a…".
        model: the serialised ONNX ModelProto for the session.
        inputs, outputs: the form of its values at the boundary, in order.
        session: the settings of the session. If ONNX Runtime has optimized `model`, its optimizers are off here.
        dtypes: element types of its values; they decide which of ONNX Runtime's optimizers are left out.
        in_order: whether its nodes run in the model's order.
        keyable: whether islands with the same key may share it: all that lowering asked about sizes is in the key.
        origins: name of an ONNX node that data can stop -> index of the FX node, among all of its island, that it was
            lowered from. Islands that share one built graph have their nodes in one order.
        record: the statistics of building it.
        kernels: the kernels of the fused operators in the model.
        values: name of a value in the model -> index of the FX node that gives it, as in `origins`. Passes and
            optimizers may have removed some. If a node has several values, the first that is left counts.
        reference: with the option verify_sessions, the model before ONNX Runtime's optimizers.
    """

    name: str
    model: bytes = dataclasses.field(repr=False)
    inputs: tuple[ValueSpec, ...]
    outputs: tuple[ValueSpec, ...]
    session: SessionSettings
    dtypes: frozenset[ir.DataType]
    in_order: bool
    keyable: bool
    origins: Mapping[str, int] = dataclasses.field(repr=False)
    record: BuildRecord = dataclasses.field(repr=False, compare=False)
    kernels: tuple[FusedOp, ...] = dataclasses.field(default=(), repr=False)
    values: Mapping[str, int] = dataclasses.field(default_factory=dict, repr=False)
    reference: bytes = dataclasses.field(default=b"", repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of the model; weights are inputs, so it holds the graph and its constants."""
        return len(self.model)


def built_of(name: str, model: ir.Model, session: SessionSettings, kernels: tuple[FusedOp, ...] = ()) -> BuiltGraph:
    """Take a model that no island was lowered to as built; its inputs and outputs are contiguous tensors."""
    inputs, outputs = (
        tuple(ValueSpec(ONNX_TO_TORCH[value.dtype]) for value in values if value.dtype is not None)
        for values in (model.graph.inputs, model.graph.outputs)
    )
    nodes = list(model.graph)
    values = (*model.graph.inputs, *(value for node in nodes for value in node.outputs))
    return BuiltGraph(
        name=name,
        model=ir.to_proto(model).SerializeToString(),
        inputs=inputs,
        outputs=outputs,
        session=session,
        dtypes=frozenset(value.dtype for value in values if value.dtype is not None),
        in_order=False,
        keyable=False,
        origins={},
        record=BuildRecord(len(nodes), (), {}),
        kernels=kernels,
    )
