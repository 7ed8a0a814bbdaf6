"""Move casts between float32 and a narrower dtype to where they cost least; cancel those that meet."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from ort_dynamo.errors import InvalidOptionError
from ort_dynamo.options.cast_strategy import PropagateCastOpsStrategy, checked_allow, checked_level, checked_strategy
from ort_dynamo.options.checks import is_bool
from ort_dynamo.options.spelling import nearest
from ort_dynamo.passes.onnx.analysis.element_counts import ElementCounts
from ort_dynamo.passes.onnx.analysis.opsets import is_older, opset_of
from ort_dynamo.passes.onnx.analysis.value_types import infer_missing_types
from ort_dynamo.passes.onnx.cast_propagation.editor import CastEditor
from ort_dynamo.passes.onnx.cast_propagation.narrowing_rules import (
    COMPUTES_WIDE,
    Operands,
    Proof,
    allowed_operators,
    known_operators,
    operands,
)
from ort_dynamo.passes.onnx.cast_propagation.regions import find_regions, is_cast
from ort_dynamo.passes.ordering import Condition, ordering
from ort_dynamo.targets.target import Target

__all__ = ["CastResult", "CastSummary", "PropagateCasts"]

_log = logging.getLogger(__name__)

_OPSET = 6
"""The first opset whose casts state a dtype by its number, not by its name."""

_NARROW = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_BYTES_PER_ELEMENT = 4 + 2  # one side of such a cast is float32, the other has 16 bits


@dataclass(frozen=True)
class CastSummary:
    """The effect of one run of the pass on the casts between float32 and the narrow types.

    Attributes:
        before: casts before the run, without those that nothing reads, which are just removed.
        moved: casts that stand elsewhere now.
        removed: casts that are gone for good.
        inserted: casts beyond those moved.
        narrowed: nodes that compute in a narrow type now.
        bytes_saved: bytes that the casts read and write less, each time the model runs; casts of unknown size, which
            are never more than before, are left out.
        modified: whether the model is another one now, casts or not.
    """

    before: int = 0
    moved: int = 0
    removed: int = 0
    inserted: int = 0
    narrowed: int = 0
    bytes_saved: int = 0
    modified: bool = False

    @property
    def after(self) -> int:
        """Casts after the run."""
        return self.before - self.removed + self.inserted

    def __str__(self) -> str:
        return (
            f"{self.before} casts became {self.after}: {self.moved} moved, {self.removed} removed, "
            f"{self.inserted} inserted; {self.narrowed} nodes narrowed, {self.bytes_saved} bytes of casts saved"
        )


@dataclass
class CastResult(ir.passes.PassResult):
    """The result of the pass, with its changes to the casts."""

    summary: CastSummary


@ordering(needs=[Condition.ROUND_TRIPS_GONE, Condition.BEFORE_FUSIONS], gives=[Condition.CASTS_MOVED])
@dataclass(frozen=True)
class PropagateCasts(ir.passes.InPlacePass):
    """Merge and cancel casts between float32 and float16 or bfloat16, and move them over allowed operators.

    1. Remove a cast to the dtype that its operand has.
    2. Merge casts of one value to one dtype.
    3. Remove a cast to the narrow dtype of a value that was widened from it, and the widening if nothing else reads
       it. A float32 value that was rounded and widened stays rounded.
    4. Narrow allowed operators if the casts around them then have no more elements than before. Elements are counted
       after rules 1 to 3, symbol by symbol for dynamic shapes. Among equally cheap choices, take the one with the most
       narrow nodes. Types and names of inputs and outputs of graphs and subgraphs do not change.

    A model of opset 5 or older does not change.

    Strategies and levels are those of ONNX Runtime's PropagateCastOps. Its search, which moves single casts over single
    nodes without counting, is replaced by a minimum cut.

    Attributes:
        strategy: NONE stops after rule 3; see PropagateCastOpsStrategy.
        level: -1 does nothing. 0 allows the operators in `allow`, and between casts also those whose kernels compute in
            float32 anyway (Softmax, Tanh, layer normalizations). 1 adds data movement and sign changes, which rounding
            commutes with: under FLOOD_FILL no bit of any result changes. 2 adds arithmetic (Add, Gelu, Dropout ...)
            and the former without casts on both sides, and lets float32 values be rounded where they enter a region.
        allow: more operator types, at every level from 0.
        dtype: the narrow type; None takes float16 and bfloat16 in turn.
        allow_layer_norm_mod_precision: allow layer normalizations at every level from 0.
        target: must have kernels for the narrowed nodes, and know the operators in `allow`; None checks only the
            schemas of the operators.

    Raises (in the constructor):
        InvalidOptionError: an invalid value of a parameter.
    """

    strategy: PropagateCastOpsStrategy = PropagateCastOpsStrategy.FLOOD_FILL
    level: int = 1
    allow: tuple[str, ...] = ()
    dtype: ir.DataType | None = None
    allow_layer_norm_mod_precision: bool = False
    target: Target | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "strategy", checked_strategy(self.strategy, "strategy"))
        object.__setattr__(self, "level", checked_level(self.level, "level"))
        object.__setattr__(self, "allow", checked_allow(self.allow, "allow"))
        is_bool("allow_layer_norm_mod_precision", self.allow_layer_norm_mod_precision)
        if self.dtype not in (None, *_NARROW):
            raise InvalidOptionError(name="dtype", value=self.dtype, expected="None, FLOAT16 or BFLOAT16")
        if self.target is not None:
            _check_known(self.allow, self.target)

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite the main graph and all sub-graphs."""
        summary = self.propagate(model)
        return CastResult(model, summary.modified, summary)

    def propagate(self, model: ir.Model) -> CastSummary:
        """Rewrite `model` in place, and count the changes.

        Missing types are inferred and added; that alone is no modification. Values that inference cannot type stay
        untyped.
        """
        if self.level < 0 or is_older(model, _OPSET) or not _may_have_casts(model):
            return CastSummary()
        infer_missing_types(model)
        dtypes = [dtype for dtype in _NARROW if self.dtype in (None, dtype) and any(_casts(model, dtype))]
        if not dtypes:
            return CastSummary()
        editor, narrowed = CastEditor(model, repr(self)), 0
        unused = [editor.remove_unused(dtype) for dtype in dtypes]  # before counting: they cost nothing
        modified = any(unused)
        sizes = ElementCounts(model)
        before = {node: (dtype, _elements(node, sizes)) for dtype in dtypes for node in _casts(model, dtype)}
        while True:
            done = [self._round(model, dtype, editor) for dtype in dtypes]
            narrowed += sum(nodes for nodes, _ in done)
            if not any(changed for _, changed in done):
                break
            modified = True
        sizes = ElementCounts(model)
        after = {node: (dtype, _elements(node, sizes)) for dtype in dtypes for node in _casts(model, dtype)}
        summary = _summary(before, after, narrowed, modified)
        _log.info("cast propagation: %s", summary)
        return summary

    def _round(self, model: ir.Model, dtype: ir.DataType, editor: CastEditor) -> tuple[int, bool]:
        """Remove casts, then narrow the regions that pay, inner graphs first.

        Returns:
            The number of narrowed nodes, and whether anything changed.
        """
        narrowed, changed = 0, False
        for graph in [*reversed(list(model.graph.subgraphs())), model.graph]:
            changed |= editor.reduce(graph, dtype)
            changed |= editor.remove_unused(dtype)  # a dead cast must not attract others
            if self.strategy == PropagateCastOpsStrategy.NONE:
                continue
            sizes = ElementCounts(model)
            for region in find_regions(graph, dtype, sizes, self._allowed(model, dtype), self._proof):
                editor.narrow(region, dtype)
                narrowed += len(region.nodes)
        changed |= editor.remove_unused(dtype)
        return narrowed, changed or narrowed > 0

    def _allowed(self, model: ir.Model, dtype: ir.DataType) -> Callable[[ir.Node], Operands | None]:
        types = self._chosen_operators() | COMPUTES_WIDE

        def allowed(node: ir.Node) -> Operands | None:
            if node.op_type not in types:
                return None
            return operands(node, dtype, opset_of(model, node.domain), self.target)

        return allowed

    def _chosen_operators(self) -> frozenset[str]:
        return allowed_operators(self.level, self.allow, self.allow_layer_norm_mod_precision)

    def _proof(self, node: ir.Node) -> Proof:
        if node.op_type not in self._chosen_operators():
            return Proof.GIVEN_AND_WANTED
        exact = self.level < 2 and self.strategy == PropagateCastOpsStrategy.FLOOD_FILL
        return Proof.GIVEN_OR_WANTED if exact else Proof.NOTHING


def _check_known(allow: Iterable[str], target: Target) -> None:
    """Check the names of operators: a misspelt one would have no effect."""
    known = known_operators(target)
    for name in allow:
        if name not in known:
            expected = "operator types of ONNX or ONNX Runtime" + nearest(name, sorted(known))
            raise InvalidOptionError(name="cast_strategy['allow']", value=name, expected=expected)


def _may_have_casts(model: ir.Model) -> bool:
    """Check whether there may be casts between float32 and a narrow type. It looks at each node and value once."""
    nodes = list(model.graph.all_nodes())
    casts = [node for node in nodes if node.op_type == "Cast"]
    graphs = [model.graph, *model.graph.subgraphs()] if casts else []
    values = [value for graph in graphs for value in (*graph.inputs, *graph.initializers.values())]
    values += [value for node in nodes for value in node.outputs]
    narrowing = any(node.attributes.get_int("to", 0) in _NARROW for node in casts)
    return bool(casts) and (narrowing or any(value.dtype in _NARROW for value in values))


def _casts(model: ir.Model, dtype: ir.DataType) -> Iterator[ir.Node]:
    """Yield the casts between float32 and `dtype`, in sub-graphs too."""
    for node in model.graph.all_nodes():
        if is_cast(node, dtype, ir.DataType.FLOAT) or is_cast(node, ir.DataType.FLOAT, dtype):
            yield node


def _elements(node: ir.Node, sizes: ElementCounts) -> int:
    """Return the number of elements that are cast; 0 if it is unknown."""
    size = sizes[node.outputs[0]]
    return 0 if size.symbols else size.factor


_CastSizes = Mapping[ir.Node, tuple[ir.DataType, int]]


def _summary(before: _CastSizes, after: _CastSizes, narrowed: int, modified: bool) -> CastSummary:
    def kinds(casts: _CastSizes, without: _CastSizes) -> Counter[tuple[ir.DataType, int]]:
        return Counter((casts[node][0], node.attributes.get_int("to", 0)) for node in casts if node not in without)

    gone, made = kinds(before, after), kinds(after, before)
    moved = (gone & made).total()
    return CastSummary(
        before=len(before),
        moved=moved,
        removed=gone.total() - moved,
        inserted=made.total() - moved,
        narrowed=narrowed,
        bytes_saved=_BYTES_PER_ELEMENT * (sum(n for _, n in before.values()) - sum(n for _, n in after.values())),
        modified=modified,
    )
