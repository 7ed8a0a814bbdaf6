"""Read values in the wider type in which they were computed, not rounded and widened again."""

from __future__ import annotations

from dataclasses import dataclass, field

import onnx_ir as ir
from onnx_ir.traversal import RecursiveGraphIterator

from ort_dynamo.graph.marks import FOR_KERNEL, FX_NODE, PASS, READS_ROUNDED
from ort_dynamo.passes.onnx.analysis.casts import is_widening
from ort_dynamo.passes.onnx.analysis.decisions import is_discontinuous, nodes_before_decisions
from ort_dynamo.passes.onnx.analysis.replacing import replace_outputs
from ort_dynamo.passes.onnx.analysis.shapes import RESHAPES
from ort_dynamo.passes.onnx.analysis.value_names import ValueNames
from ort_dynamo.passes.ordering import Condition, ordering

__all__ = ["RemoveRoundTrips"]

_FREE = RESHAPES | {"Identity"}
"""Change a shape, not data: a second one for another type costs nothing."""

_MOVES = _FREE | {"Expand", "Slice", "Transpose"}
"""Move the elements of their first input."""


@ordering(needs=[Condition.EQUALS_MERGED], gives=[Condition.ROUND_TRIPS_GONE])
@dataclass(frozen=True)
class RemoveRoundTrips(ir.passes.InPlacePass):
    """Remove Cast(narrow -> wide) of Cast(wide -> narrow) if one of them exists only for lack of a kernel.

    An operator without a kernel for its dtype is computed in a wider one between casts. Two such operators in a row
    give op, cast, cast, op, maybe with data movement between the casts. Readers of the second cast then read the first
    operator's result, which is more accurate than the rounded one. Compilers call this excess precision (XLA's
    xla_allow_excess_precision).

    The conditions are:

    1. One of the casts was added for a kernel (metadata FOR_KERNEL). A user's x.bfloat16().float() is kept.
    2. Both casts come from one ATen node, whose eager kernel rounds once, at its end. Or, with `excess_precision`, the
       narrow dtype is bfloat16, which has the range of the wide one. A float16 overflow between two nodes is kept,
       since torch.amp.GradScaler skips steps by it.
    3. No operator decides by the value: no comparison, conversion to integers or sort reads it, or reads a number that
       follows from it and is not rounded. In x == max(x), and in x - floor(x), all operands come from one x.
    4. The reader is no rounding, check for NaN or cast either. Outputs of the graph are readers, too. The reader's
       lowering did not ask for the rounding (metadata READS_ROUNDED), nor did that of a node behind data movement.

    Attributes:
        excess_precision: also remove roundings to bfloat16 between ATen nodes.
    """

    excess_precision: bool = True

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite every graph of the model."""
        widenings = [node for node in RecursiveGraphIterator(model.graph) if is_widening(node)]
        if not widenings:
            return ir.passes.PassResult(model, False)
        run = _Run(self, ValueNames(model), nodes_before_decisions(model.graph))
        for node in widenings:
            run.visit(node)
        return ir.passes.PassResult(model, run.modified)


@dataclass
class _Run:
    pass_: RemoveRoundTrips
    names: ValueNames
    deciding: set[ir.Node]
    modified: bool = False
    _made: dict[tuple[ir.Value, ir.Graph], ir.Value] = field(default_factory=dict)

    def visit(self, widening: ir.Node) -> None:
        """Give the consumers of a widening cast the value before its rounding."""
        rounded, (widened,) = _first(widening), widening.outputs
        if any(use.node in self.deciding for use in widened.uses()):
            return
        uses = [use for use in widened.uses() if _reads_exact(use.node)]
        if not (uses or widened.is_graph_output()) or not self._is_rounded(rounded, widening):
            return
        exact = self._unrounded(rounded, widening)
        for use in uses:
            use.node.replace_input_with(use.idx, exact)
        if widened.is_graph_output():
            assert isinstance(widening.graph, ir.Graph)
            replace_outputs(widening.graph, widened, self._computed_in(widening, exact))
        self.modified = True

    def _is_rounded(self, value: ir.Value, widening: ir.Node) -> bool:
        """Check whether `value` is a rounding that may be removed, or made of such roundings by data movement alone."""
        node = value.producer()
        if node is None or node.domain:
            return False
        if node.op_type == "Cast":
            return _first(node).dtype == widening.outputs[0].dtype and self._may_go(node, widening)
        alone = len(value.uses()) == 1 and not value.is_graph_output()
        if node.op_type in _FREE or (node.op_type in _MOVES and alone):
            return self._is_rounded(_first(node), widening)
        if node.op_type == "Concat" and alone:
            return all(part is not None and self._is_rounded(part, widening) for part in node.inputs)
        return False

    def _may_go(self, rounding: ir.Node, widening: ir.Node) -> bool:
        made = [FOR_KERNEL in cast.metadata_props for cast in (rounding, widening)]
        if self.pass_.excess_precision and rounding.outputs[0].dtype == ir.DataType.BFLOAT16:
            return any(made)
        return all(made) and rounding.metadata_props.get(FX_NODE) == widening.metadata_props.get(FX_NODE)

    def _computed_in(self, widening: ir.Node, exact: ir.Value) -> ir.Value:
        """`exact` as an output of the graph of `widening`: ONNX Runtime takes no value of an outer graph as one."""
        graph, producer = widening.graph, exact.producer()
        assert isinstance(graph, ir.Graph)
        if producer is not None and producer.graph is graph:
            return exact
        metadata = {PASS: repr(self.pass_)}
        copy = ir.node("Identity", [exact], version=widening.version, metadata_props=metadata)
        (result,) = copy.outputs
        result.name = self.names.fresh(f"{widening.outputs[0].name}_unrounded")
        result.type, result.shape = exact.type, exact.shape
        graph.insert_before(widening, copy)
        return result

    def _unrounded(self, value: ir.Value, widening: ir.Node) -> ir.Value:
        """Give the value before its rounding; movements in between are rebuilt before `widening`, in the wide type."""
        node, graph = value.producer(), widening.graph
        assert node is not None
        assert isinstance(graph, ir.Graph)
        if node.op_type == "Cast":
            return _first(node)
        if (value, graph) not in self._made:
            moved = node.inputs if node.op_type == "Concat" else node.inputs[:1]
            inputs = [self._unrounded(part, widening) for part in moved if part is not None]
            copy = ir.Node(
                node.domain,
                node.op_type,
                [*inputs, *node.inputs[len(inputs) :]],
                node.attributes.values(),
                version=node.version,
                metadata_props={**node.metadata_props, PASS: repr(self.pass_)},
            )
            (result,) = copy.outputs
            result.name = self.names.fresh(f"{value.name}_unrounded")
            result.type, result.shape = widening.outputs[0].type, value.shape
            graph.insert_before(widening, copy)
            self._made[value, graph] = result
        return self._made[value, graph]


def _reads_exact(reader: ir.Node) -> bool:
    return not is_discontinuous(reader) and not _asks_for_rounding(reader)


def _asks_for_rounding(reader: ir.Node) -> bool:
    """Check whether the lowering of a node asked for the rounding; one that moves data asks if a reader does."""
    if READS_ROUNDED in reader.metadata_props:
        return True
    moves = not reader.domain and reader.op_type in {*_MOVES, "Concat"}
    return moves and any(_asks_for_rounding(use.node) for value in reader.outputs for use in value.uses())


def _first(node: ir.Node) -> ir.Value:
    value = node.inputs[0]
    assert value is not None
    return value
