"""Walk an FX graph and call each node's lowering; errors name the user's line."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir
import torch
from torch.fx import GraphModule, Node

from ort_dynamo.errors import LoweringError, UnsupportedNodeError
from ort_dynamo.graph.boundary import ValueSpec, inverse, output_spec
from ort_dynamo.graph.dtypes import onnx_dtype, onnx_tensor
from ort_dynamo.graph.marks import LACKED_SYMBOLS, NUMBER
from ort_dynamo.graph.source_line import user_line
from ort_dynamo.lowering import torchlib
from ort_dynamo.lowering.builder import LoweringBuilder, MixedTypesError
from ort_dynamo.lowering.check_shapes import check_shapes
from ort_dynamo.lowering.context import LoweringContext
from ort_dynamo.lowering.equal_sizes import EqualSizes
from ort_dynamo.lowering.kernel_checks import node_left_to_torch
from ort_dynamo.lowering.random_ops import RANDOM_OPS
from ort_dynamo.lowering.registry import find_lowering, is_from_outside, name_of
from ort_dynamo.lowering.symbols import Symbols, known_dims, symbols_of
from ort_dynamo.lowering.value_checks import check_outputs, check_tensor, entering_spec, is_number
from ort_dynamo.program.progress import counted
from ort_dynamo.targets.target import OPSET, Target
from ort_dynamo.torch_internals.fakes import fakes_around
from ort_dynamo.torch_internals.kernels.operators import OpOverload, higher_order
from ort_dynamo.torch_internals.pytree import tree_leaves
from ort_dynamo.torch_internals.sizes.size_guards import SIZE_FACTS, recording, replaying
from ort_dynamo.torch_internals.sizes.symbols import DataDependentSizeError, given_expression, known_true

__all__ = ["COND", "Lowered", "lower", "refusal"]

COND = higher_order.cond
"""The one higher-order operator that is lowered; segment/classify.py keeps the others in eager."""

LacksKernel = Callable[[ir.Model], str | None]
"""Gives the reason why a node of a model that needs a fused kernel would not get one; None if all get one."""

_IR_VERSION = 10  # the newest that onnxruntime-training 1.19.2 reads


@dataclass(frozen=True)
class Lowered:
    """A lowered graph.

    Attributes:
        model: the graph in ONNX.
        inputs, outputs: how they map to the FX graph's, in order.
        keyable: records of the graph's nodes answered every question about sizes, so the graph's key decides the model.
        values: FX node -> its ir.Value, or a tuple of ir.Value | None; numbers and sub-graphs are there as they are.
    """

    model: ir.Model
    inputs: tuple[ValueSpec, ...]
    outputs: tuple[ValueSpec, ...]
    keyable: bool
    values: Mapping[Node, Any] = field(default_factory=dict, repr=False)


def lower(gm: GraphModule, target: Target) -> Lowered:
    """Lower a graph in which every node was found lowerable.

    Questions about sizes are answered by the records of `refusal`.

    Args:
        gm: placeholders, get_attr nodes of sub-graphs, and call_function nodes, with fake values in meta["val"]; one
            output node that holds a tuple of tensors.
        target: the target of the lowering.

    Raises:
        LoweringError: with the node and the user's line.
    """
    (output,) = gm.graph.find_nodes(op="output")
    inputs = [(node, entering_spec(node, target)) for node in gm.graph.find_nodes(op="placeholder")]
    outputs = [(node, output_spec(node.meta["val"])) for node in output.args[0]]
    facts = (fact for node in gm.graph.nodes for fact in node.meta.get(SIZE_FACTS, ()))
    with replaying(facts) as answered:
        walk = _lower(gm, target, inputs, outputs)
    model = ir.Model(walk.graph, ir_version=_IR_VERSION, producer_name="ort_dynamo")
    return Lowered(model, tuple(s for _, s in inputs), tuple(s for _, s in outputs), not answered.missing, walk.values)


_Specs = Sequence[tuple[Node, ValueSpec]]


def _lower(gm: GraphModule, target: Target, inputs: _Specs, outputs: _Specs) -> _Walk:
    walk = _Walk(target)
    for node, spec in inputs:
        walk.add_input(node, spec)
    for node in counted(gm.graph.nodes, "translating to ONNX"):
        try:
            if node.op == "call_function" and is_number(node):
                walk.add_number(node)  # in a whole graph; an island gets its sizes
            elif node.op == "call_function":
                walk.add_node(node)
            elif node.op == "get_attr":
                walk.add_attribute(node)
        except Exception as error:
            raise _located(node, error) from error
    for index, (node, spec) in enumerate(outputs):
        walk.add_output(node, index, spec)
    walk.equal_sizes.rename_in(walk.graph)
    return walk


def refusal(node: Node, target: Target, lacks_kernel: LacksKernel = lambda model: None) -> str | None:
    """Give the reason why `node` cannot run on `target`, or None, by lowering it alone into a scratch graph.

    The lowering's questions about sizes are recorded in the node's meta, for the key of the graph that will hold it.
    If the target fuses kernels, `lacks_kernel` checks the scratch graph, too.

    Raises:
        LoweringError: the node's lowering has a bug.
    """
    with recording() as facts:
        reason = _refusal(node, target, lacks_kernel)
    node.meta[SIZE_FACTS] = tuple(facts)
    return reason


def _refusal(node: Node, target: Target, lacks_kernel: LacksKernel) -> str | None:
    if not is_from_outside(node.target) and (reason := node_left_to_torch(node)) is not None:
        return reason
    walk = _Walk(target)
    try:
        walk.offer_all_sizes(node)
        for argument in node.all_input_nodes:
            if isinstance(subgraph := _attribute(argument), GraphModule):
                walk.values[argument] = subgraph
            else:
                walk.add_argument(argument)
        walk.add_node(node)
        if is_from_outside(node.target):
            check_shapes(walk.model(node))
        if target.has_defect("kernels_refuse_nothing") and (op_type := walk.refuses_nothing()) and _may_be_empty(node):
            return f"the target's {op_type} takes no tensor without elements"
        if target.fuses_kernels:
            return lacks_kernel(walk.model(node))
    except UnsupportedNodeError as error:
        return error.reason
    except MixedTypesError as error:
        if not _mixes_dtypes(node):
            raise _located(node, error) from error
        return f"it mixes dtypes, which only torch's kernels check: {error}"
    except DataDependentSizeError as error:
        return f"its form depends on a size that is known only when the data is: {error.cond}"
    except Exception as error:
        raise _located(node, error) from error
    return None


def _may_be_empty(node: Node) -> bool:
    """Check whether a tensor that a node reads or gives has no element, or a size that guards allow to be 0."""
    return not all(known_true(size > 0) for fake in fakes_around(node) for size in fake.shape)


def _mixes_dtypes(node: Node) -> bool:
    fakes = tree_leaves([argument.meta.get("val") for argument in node.all_input_nodes])
    return len({fake.dtype for fake in fakes if isinstance(fake, torch.Tensor)}) > 1


class _Walk:
    """One graph being lowered: a whole one, or, with `around`, a branch inside another, whose values it reads."""

    def __init__(self, target: Target, name: str = "", around: _Walk | None = None) -> None:
        opsets = {"": OPSET, "com.microsoft": 1}
        self.graph = ir.Graph([], [], nodes=[], opset_imports=opsets, name=name or "ort_train")
        self._builder = LoweringBuilder(self.graph, target)
        by_shapes = target.facts.keeps_sizes_on_host
        self._symbols: Symbols = around._symbols if around else Symbols(self._builder, by_shapes=by_shapes)
        self._fakes: dict[ir.Value, torch.Tensor] = around._fakes if around else {}
        self.equal_sizes: EqualSizes = around.equal_sizes if around else EqualSizes()
        self.values: dict[Node, Any] = {}
        self._prefix = f"{name}." if name else ""  # no two graphs of a model share a name
        if name:
            self._builder.push_module(name)

    def offer_all_sizes(self, node: Node) -> None:
        """Make the size symbols around `node` readable that segment/islands.py can hand to an island."""
        fakes = [node.meta.get("val"), *(argument.meta.get("val") for argument in node.all_input_nodes)]
        for symbol in symbols_of(fakes).free.difference(node.meta.get(LACKED_SYMBOLS, ())):
            self._symbols.offer_scalar(symbol, self._builder.input(f"size_{symbol}", ir.DataType.INT64, []))

    def add_argument(self, node: Node) -> None:
        """Add, as an input, a value that a node reads that is lowered alone."""
        fake = node.meta["val"]
        if isinstance(fake, (tuple, list)):  # getitem of a fallback node
            self.values[node] = tuple(None if f is None else self._fake_input(node.name, f) for f in fake)
        else:
            self.add_input(node, entering_spec(node, self._builder.target))

    def refuses_nothing(self) -> str | None:
        """Return an operator of this graph whose kernel on CUDA refuses an axis of size 0, or None."""
        used = {node.op_type for node in self.graph}
        return next((name for name in sorted(used) if name.startswith("Reduce") or name == "Trilu"), None)

    def model(self, node: Node) -> ir.Model:
        """Return this graph as a model that gives the results of `node`."""
        given = dict.fromkeys(v for v in tree_leaves(self.values[node]) if isinstance(v, ir.Value))
        self.graph.outputs.extend(value for value in given if not value.is_graph_output())
        return ir.Model(self.graph, ir_version=_IR_VERSION)

    def add_input(self, node: Node, spec: ValueSpec) -> None:
        fake = node.meta["val"]
        if spec.as_rows:
            value = self._builder.input(node.name, onnx_dtype(spec.dtype), [_dim(fake), 0])
            self._symbols.offer_dim(given_expression(fake), value, 0)
            self.values[node] = fake
        elif spec.is_number:
            value = self._builder.input(node.name, onnx_dtype(spec.dtype), [])
            value.meta[NUMBER] = True
            if isinstance(fake, (torch.SymInt, torch.SymFloat)):
                self._symbols.offer_scalar(given_expression(fake), value)
            self.values[node] = fake
        else:
            self.values[node] = self._fake_input(node.name, fake, spec.order)

    def _fake_input(self, name: str, fake: torch.Tensor, order: tuple[int, ...] = ()) -> ir.Value:
        axes = order or tuple(range(fake.dim()))
        value = self._builder.input(name, onnx_dtype(fake.dtype), [_dim(fake.shape[axis]) for axis in axes])
        for axis, expr in known_dims(fake):
            self._symbols.offer_dim(expr, value, axes.index(axis))
        if order:
            value = self._builder.op.Transpose(value, perm=inverse(order))
        self._fakes[value] = fake
        return value

    def add_attribute(self, node: Node) -> None:
        """Add a sub-graph, or a constant tensor of the program; an island gets such a tensor as an input."""
        found = _attribute(node)
        if isinstance(found, torch.Tensor):
            name, fake = node.name, node.meta["val"]
            found = self._builder.initializer(onnx_tensor(found, name), name)
            self._fakes[found] = fake
        self.values[node] = found

    def add_number(self, node: Node) -> None:
        """Add arithmetic on sizes; its readers look up the value."""
        number = node.meta["val"]
        self._symbols.value(given_expression(number))  # refuses sizes that depend on data
        self.values[node] = number

    def add_node(self, node: Node) -> None:
        if node.target is COND:
            self._add_cond(node)
            return
        if node.target is operator.getitem:
            value = self.values[node.args[0]][node.args[1]]  # type: ignore[index]
            if value is None:
                raise AssertionError(f"output {node.args[1]} of {node.args[0]} was not lowered")
            self.values[node] = value
            return
        check_outputs(node)
        if self._symbols.is_needed:
            self.equal_sizes.add(node)
        if not isinstance(node.target, OpOverload):
            raise UnsupportedNodeError(f"{node.target} is not an ATen operator")
        context = LoweringContext(self._builder, self._symbols, self._fakes, node)
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), self.values.__getitem__)
        random = RANDOM_OPS.get(node.target) if self._builder.target.stands_alone else None
        function = random or find_lowering(node.target)
        self._builder.origin, self._builder.reads_rounded = f"{node.name}: {node.target}", False
        result = torchlib.call(context, args, kwargs) if function is None else function(context, *args, **kwargs)
        self._settle(node, result)

    def _settle(self, node: Node, result: Any) -> None:
        fake = node.meta["val"]
        if isinstance(fake, torch.Tensor):
            self.values[node] = self._settle_one(node.name, result, fake)
            return
        if not isinstance(result, (tuple, list)) or len(result) != len(fake):
            raise AssertionError(f"the lowering gives {result!r}, torch gives {len(fake)} outputs")
        settled = []
        for index, (value, one) in enumerate(zip(result, fake, strict=True)):
            settled.append(value if value is None else self._settle_one(f"{node.name}.{index}", value, one))
        self.values[node] = tuple(settled)

    def _settle_one(self, name: str, value: ir.Value, fake: torch.Tensor) -> ir.Value:
        if not isinstance(value, ir.Value):
            raise AssertionError(f"the lowering gives {value!r}, not an onnx_ir.Value")
        expected = onnx_dtype(fake.dtype)
        if value.dtype is None:
            value.dtype = expected
        if value.dtype != expected:
            raise AssertionError(f"the lowering gives {value.dtype}, torch gives {expected}")
        if value in self._fakes or value.is_initializer() or value.is_graph_input():
            value = self._builder.op.Identity(value)  # one FX node, one value: the fake tensors may differ
        value.name = f"{self._prefix}{name}"
        value.shape = ir.Shape([_dim(size) for size in fake.shape])
        self._fakes[value] = fake
        if not self._prefix:  # a branch adds the nodes of sizes to the graph around it
            for axis, expr in known_dims(fake):
                self._symbols.offer_computed_dim(expr, value, axis)
        return value

    # -- torch.cond --------------------------------------------------------------------------------------------

    def _add_cond(self, node: Node) -> None:
        """cond(predicate, true_graph, false_graph, operands) -> tuple, as If; the branches read the operands."""
        arguments = torch.fx.node.map_arg(node.args, self.values.__getitem__)
        predicate, on_true, on_false, operands = arguments
        if not isinstance(predicate, ir.Value):
            raise UnsupportedNodeError("its condition is a symbolic truth value")
        fakes = node.meta["val"]
        returned = [index for index, fake in enumerate(fakes) if fake is not None]
        if not returned or not all(isinstance(fakes[index], torch.Tensor) for index in returned):
            raise UnsupportedNodeError("its branches return something other than tensors")
        for index in returned:
            check_tensor(fakes[index])
        then_branch = self._branch(f"{self._prefix}{node.name}_then", on_true, operands, returned)
        else_branch = self._branch(f"{self._prefix}{node.name}_else", on_false, operands, returned)
        self._builder.origin = f"{node.name}: {node.target}"
        op = self._builder.op
        condition = op.Reshape(predicate, []) if self._fakes[predicate].dim() else predicate
        if predicate.dtype != ir.DataType.BOOL:
            condition = op.Cast(condition, to=ir.DataType.BOOL)
        found = op.If(condition, then_branch=then_branch, else_branch=else_branch, _outputs=len(returned))
        results: list[ir.Value | None] = [None] * len(fakes)
        for index, value in zip(returned, (found,) if isinstance(found, ir.Value) else found, strict=True):
            results[index] = value
        self._settle(node, results)

    def _branch(self, name: str, gm: GraphModule, operands: Any, returned: list[int]) -> ir.Graph:
        walk = _Walk(self._builder.target, name, around=self)
        for placeholder, operand in zip(gm.graph.find_nodes(op="placeholder"), operands, strict=True):
            walk.values[placeholder] = operand
        for node in gm.graph.nodes:
            try:
                walk._add_branch_node(node)
            except UnsupportedNodeError as error:
                raise UnsupportedNodeError(f"in a branch, {node.target}: {error.reason}") from error
        (output,) = gm.graph.find_nodes(op="output")
        for index in returned:
            value = walk.values.get(output.args[0][index])
            if not isinstance(value, ir.Value):
                raise UnsupportedNodeError("a branch returns something other than a tensor")
            value = _behind_identity(value)
            producer = value.producer()
            if producer is None or producer.graph is not walk.graph or value in walk.graph.outputs:
                # Not by Identity, which passes remove: a branch must not return a value from around it, or one twice.
                value = walk._builder.op.Expand(value, walk._builder.constant([], ir.DataType.INT64))
                value.name = f"{walk._prefix}output_{index}"
            walk.graph.outputs.append(value)
        return walk.graph

    def _add_branch_node(self, node: Node) -> None:
        if node.op == "get_attr":
            self.values[node] = attribute = _attribute(node)
            if not isinstance(attribute, GraphModule):
                raise UnsupportedNodeError("it reads a constant tensor")
        elif node.op == "call_function":
            if is_number(node):
                self.add_number(node)
                return
            if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
                raise UnsupportedNodeError("a random operator")
            self.add_node(node)

    def add_output(self, node: Node, index: int, spec: ValueSpec) -> None:
        value, fake, order = self.values[node], node.meta["val"], spec.order
        if order:
            value = self._builder.op.Transpose(value, perm=list(order))
        elif value.is_graph_input() or value in self.graph.outputs:
            value = self._builder.op.Identity(value)
        value.name = f"output_{index}"
        value.type = ir.TensorType(onnx_dtype(fake.dtype))
        value.shape = ir.Shape([_dim(fake.shape[axis]) for axis in order or range(fake.dim())])
        self.graph.outputs.append(value)


def _attribute(node: Node) -> Any:
    """Return the sub-graph or tensor that a get_attr node names; None of other nodes."""
    return operator.attrgetter(str(node.target))(node.graph.owning_module) if node.op == "get_attr" else None


def _behind_identity(value: ir.Value) -> ir.Value:
    while (producer := value.producer()) is not None and producer.op_type == "Identity":
        (source,) = producer.inputs
        assert source is not None
        value = source
    return value


def _located(node: Node, error: Exception) -> LoweringError:
    advice = "Please report this message, unless a pass of your program made this node."
    if is_from_outside(node.target) and (function := find_lowering(node.target)):
        advice = f"Your program registered this lowering: {name_of(function)}."
    detail = f"{type(error).__name__}: {error}\n  {advice}"
    return LoweringError(node=node.format_node(), where=user_line(node), error=detail)


def _dim(size: int | torch.SymInt) -> int | str:
    return str(given_expression(size)) if isinstance(size, torch.SymInt) else size
