"""From an ONNX graph to a program of torch's functions: names, nodes, functions, and subgraphs in control.

Nodes that compute with known numbers only are computed here; all others become calls in the program.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

import onnx
import torch
from onnx import AttributeProto, FunctionProto, GraphProto, NodeProto, TypeProto
from torch import Tensor, fx

from ort_dynamo.errors import OnnxModelError
from ort_dynamo.graph.model_limits import FunctionKey, domain_of, function_key
from ort_dynamo.onnx_module.attributes import bind_attributes, own_attributes
from ort_dynamo.onnx_module.check_model import read_opsets
from ort_dynamo.onnx_module.host_values import HOST_LIMIT, Host, as_tensor, device_of
from ort_dynamo.onnx_module.operators import pointwise  # and registers all
from ort_dynamo.onnx_module.program import Known, Program, Scope, Stored
from ort_dynamo.onnx_module.registry import InputKind, Operator, find_operator
from ort_dynamo.onnx_module.size_limits import check_sizes
from ort_dynamo.onnx_module.tensor_data import read_tensor

__all__ = ["CONSTANTS", "Builder"]

CONSTANTS = "onnx_constants"
"""The part of the module that holds tensors of no state dict."""

_SOURCES = frozenset({"Shape", "Size", "SequenceLength", "ConstantOfShape"})
"""Give a Host for a tensor."""

_OWN_FAILURES = (ArithmeticError, AttributeError, IndexError, RuntimeError, TypeError, ValueError)
"""Exceptions that Python and torch raise where a node's numbers do not fit together."""


class Builder:
    """Builds programs of one model.

    Args:
        functions: the model's, by the domain, the name and the overload that call them.
        stored: the model's initializers by name.
        control: the functions that write the operators that have graphs.
    """

    def __init__(
        self,
        functions: Mapping[FunctionKey, FunctionProto],
        stored: Mapping[str, Stored],
        control: Mapping[str, Callable[..., Sequence[Known]]],
    ) -> None:
        self.control = control
        self.functions = functions
        self.stored = stored
        self.constants: dict[str, Stored] = {}

    def build(
        self, graph: GraphProto, inputs: Sequence[str], opsets: Mapping[str, int], types: Mapping[str, TypeProto]
    ) -> fx.GraphModule:
        """Return the program of the model's graph: takes the module and the inputs, returns a tuple."""
        program, scope = Program(), Scope(None, opsets, types=types)
        self.device: fx.Node = program.placeholder("device")
        for name, value in self.stored.items():
            scope.define(name, value)
        given = [program.placeholder("input") for _ in inputs]
        for name, node in zip(inputs, given, strict=True):
            scope.define(name, node)
        self.add_constants(graph, scope)
        self.add_nodes(program, graph.node, scope)
        outputs = [self.tensor(program, scope.find(output.name), "an output") for output in graph.output]
        self._place_device(program, given)
        return program.finish(outputs)

    def _place_device(self, program: Program, inputs: Sequence[fx.Node]) -> None:
        """Take the device from a weight, a statistic or an input."""
        device = self.device
        every = [*self.stored.values(), *self.constants.values()]
        held = [one for one in every if "data" in one.uses or "statistic" in one.uses]
        if device.users:
            source = program.held(held[0].key) if held else next(iter(inputs), None)
            device.replace_all_uses_with(program.insert(device_of if source else _no_device, source))
        program.forget(device)

    def add_constants(self, graph: GraphProto, scope: Scope) -> None:
        """Define the initializers of a graph within the model's."""
        for tensor in graph.initializer:
            if scope.outer is not None:
                scope.define(tensor.name, self.constant(read_tensor(tensor)))
        if graph.sparse_initializer:
            raise OnnxModelError(reason="sparse initializers are not supported")

    def constant(self, value: Tensor) -> Stored:
        """Return a tensor that nothing changes."""
        name = f"constant_{len(self.constants)}"
        found = Stored(f"{CONSTANTS}.{name}", value, value.dtype, tuple(value.shape), False)
        self.constants[name] = found
        return found

    def add_nodes(self, program: Program, nodes: Sequence[NodeProto], scope: Scope) -> None:
        """Write nodes, in order."""
        for node in nodes:
            self._add_node(program, node, scope)

    def _add_node(self, program: Program, node: NodeProto, scope: Scope) -> None:
        inputs = [scope.find(name) for name in node.input]
        attributes = own_attributes(node, scope.attributes)
        outputs = list(node.output)
        while outputs and not outputs[-1]:
            outputs.pop()
        found = self._results(program, node, scope, inputs, attributes, len(outputs))
        if len(outputs) > len(found):
            raise self.refusal(node, scope, f"it has {len(outputs)} outputs; there are {len(found)}")
        for name, value in zip(outputs, found, strict=False):
            if name:
                scope.define(name, value)

    def _results(
        self,
        program: Program,
        node: NodeProto,
        scope: Scope,
        inputs: list[Known],
        attributes: dict[str, AttributeProto],
        outputs: int,
    ) -> Sequence[Known]:
        domain = domain_of(node.domain)
        key = function_key(node)
        if key in self.functions:
            return self._call(program, self.functions[key], inputs, attributes, node.output)
        if domain == "" and node.op_type == "Constant":
            return [self._constant_node(node, scope, attributes)]
        if domain == "" and node.op_type == "Identity" and inputs:
            return inputs[:1]
        if domain == "" and node.op_type in self.control:
            return self.control[node.op_type](self, program, node, scope, inputs, attributes)
        version = scope.opsets.get(domain)
        found = None if version is None else find_operator(domain, node.op_type, version)
        if found is not None:
            return self._apply(program, node, scope, found, inputs, attributes, outputs)
        body = None if version is None else schema_function(node, domain, version, scope)
        if body is None:
            raise self.refusal(node, scope, "the operator is not supported")
        return self._call(program, body[0], inputs, body[1], node.output)

    def _call(
        self,
        program: Program,
        function: FunctionProto,
        inputs: Sequence[Known],
        attributes: Mapping[str, AttributeProto],
        outputs: Sequence[str],
    ) -> list[Known]:
        """Inline the nodes of a function at a call; values that nothing reads may be missing in it."""
        given = {attribute.name: attribute for attribute in function.attribute_proto}
        given.update(attributes)
        scope = Scope(None, read_opsets(function.opset_import, f"the function {function.name!r}"), given)
        if len(inputs) > len(function.input):
            raise OnnxModelError(
                reason=f"the function {function.name!r} takes {len(function.input)} inputs, not {len(inputs)}"
            )
        for index, name in enumerate(function.input):
            scope.define(name, inputs[index] if index < len(inputs) else None)
        self.add_nodes(program, function.node, scope)
        wanted = [name if at < len(outputs) and outputs[at] else "" for at, name in enumerate(function.output)]
        return [scope.find(name) for name in wanted]

    def _constant_node(self, node: NodeProto, scope: Scope, attributes: Mapping[str, AttributeProto]) -> Known:
        if len(attributes) != 1:
            raise self.refusal(node, scope, f"it has {len(attributes)} attributes; a constant has one")
        (attribute,) = attributes.values()
        if attribute.name == "value" and attribute.type == AttributeProto.TENSOR:
            return self.constant(read_tensor(attribute.t))
        dtypes = {
            ("value_float", AttributeProto.FLOAT): torch.float32,
            ("value_floats", AttributeProto.FLOATS): torch.float32,
            ("value_int", AttributeProto.INT): torch.int64,
            ("value_ints", AttributeProto.INTS): torch.int64,
        }
        dtype = dtypes.get((attribute.name, attribute.type))
        if dtype is None:
            raise self.refusal(node, scope, f"a constant by the attribute {attribute.name!r} is not supported")
        return self.constant(torch.tensor(onnx.helper.get_attribute_value(attribute), dtype=dtype))

    # -- one operator ----------------------------------------------------------------------------------------------

    def _apply(
        self,
        program: Program,
        node: NodeProto,
        scope: Scope,
        found: Operator,
        inputs: list[Known],
        attributes: Mapping[str, AttributeProto],
        outputs: int,
    ) -> Sequence[Known]:
        def refuse(reason: str) -> OnnxModelError:
            return self.refusal(node, scope, reason)

        kwargs = bind_attributes(attributes, found.attributes, found.needed, refuse)
        given, kinds = self._check_inputs(found, inputs, refuse)
        known = [one.as_host(False) if isinstance(one, Stored) else one for one in given]
        if found.function.__module__ == pointwise.__name__ and not found.host and _all_hosts(known):
            # Left to run, Dynamo would take a scalar of the file for an input that may change.
            return self._compute(found, [as_tensor(one) for one in known], kwargs, refuse)
        args = [self.argument(program, one, kind) for one, kind in zip(given, kinds, strict=True)]
        if "outputs" in found.given:
            kwargs["outputs"] = outputs
        try:
            elements = check_sizes(node.op_type, args, kwargs)
        except ValueError as error:
            raise refuse(str(error)) from error
        is_known = found.host and elements <= HOST_LIMIT  # a larger tensor is made when the graph runs
        if is_known and found.given <= {"outputs", "device"} and _all_hosts([one for one in args if one is not None]):
            device = {"device": None} if "device" in found.given else {}
            return self._compute(found, args, {**kwargs, **device}, refuse)
        statistics = [one for one, kind in zip(inputs, found.inputs, strict=False) if kind is InputKind.STATISTIC]
        if "in_place" in found.given:
            kwargs["in_place"] = all(isinstance(one, Stored) and one in self.stored.values() for one in statistics)
        if "device" in found.given:
            kwargs["device"] = program.local(self.device)
        if "training" in found.given:
            kwargs["training"] = program.held("training")
        result = program.call(found.function, args, kwargs)
        values = [one for one, kind in zip(args, kinds, strict=True) if kind is InputKind.VALUE]
        maybe = node.op_type in _SOURCES or all(isinstance(one, Host) or one in program.maybe_host for one in values)
        results = [program.call(operator.getitem, (result, at)) for at in range(outputs)] if found.several else [result]
        if found.host and maybe:
            program.maybe_host.update(results)
        return results

    def _check_inputs(
        self, found: Operator, inputs: Sequence[Known], refuse: Callable[[str], OnnxModelError]
    ) -> tuple[list[Known], list[InputKind]]:
        """Return the inputs that are there, and the operator's kind for each."""
        given = list(inputs)
        while len(given) > found.required and given[-1] is None:
            given.pop()
        more = [] if found.variadic is None else [found.variadic] * (len(given) - len(found.inputs))
        kinds = [*found.inputs, *more][: len(given)]
        if len(given) > len(kinds):
            raise refuse(f"it has {len(given)} inputs; there are at most {len(found.inputs)}")
        if len(given) < found.required or any(one is None for one in given[: found.required]):
            raise refuse(f"it has {len(given)} inputs; it needs at least {found.required}")
        if found.variadic is not None and any(one is None for one in given[len(found.inputs) :]):
            raise refuse("a required input is missing")
        return given, kinds

    def argument(self, program: Program, value: Known, kind: InputKind) -> Any:
        """Return a value in the form that an operator takes."""
        if kind in (InputKind.VALUE, InputKind.SETTING):
            host = value.as_host(kind is InputKind.SETTING) if isinstance(value, Stored) else value
            if isinstance(host, Host):
                return host
            if isinstance(value, fx.Node):
                return program.local(value)
        if kind is InputKind.SEQUENCE and isinstance(value, fx.Node):
            return program.local(value)
        if kind is InputKind.STATISTIC and isinstance(value, Stored):
            value.uses.add("statistic")
            return program.held(value.key)
        return None if value is None else self.tensor(program, value, "an input")

    def tensor(self, program: Program, value: Known, what: str) -> fx.Node:
        """Return a value as a tensor of a program."""
        if value is None:
            raise OnnxModelError(reason=f"{what} is missing")
        if isinstance(value, Stored):
            value.uses.add("data")
            return program.held(value.key)
        if isinstance(value, Host):
            return program.call(as_tensor, (value, program.local(self.device)))
        node = program.local(value)
        return program.call(as_tensor, (node, program.local(self.device))) if node in program.maybe_host else node

    def _compute(
        self, found: Operator, args: Sequence[Any], kwargs: Mapping[str, Any], refuse: Callable[[str], OnnxModelError]
    ) -> list[Known]:
        """Return the result of known numbers."""
        try:
            result = found.function(*args, **kwargs)
        except _OWN_FAILURES as error:
            raise refuse(f"it cannot be computed: {error}") from error
        results = result if found.several else (result,)
        return [one if isinstance(one, Host) else self.constant(one) for one in results]

    def refusal(self, node: NodeProto, scope: Scope, reason: str) -> OnnxModelError:
        """Return an error about a node."""
        domain, version = domain_of(node.domain), scope.opsets.get(domain_of(node.domain))
        name = node.name or next((output for output in node.output if output), "")
        return OnnxModelError(
            reason=f"node {name!r}, {domain or 'ai.onnx'}::{node.op_type} of opset {version}: {reason}",
            node=name,
            op_type=node.op_type,
            domain=domain,
            opset=version,
        )


def _all_hosts(values: Sequence[Any]) -> TypeGuard[Sequence[Host]]:
    return all(isinstance(value, Host) for value in values)


def _no_device() -> None:
    """Return None: a model without a tensor is on torch's default device."""


def schema_function(
    node: NodeProto, domain: str, version: int, scope: Scope
) -> tuple[FunctionProto, dict[str, AttributeProto]] | None:
    """Give the nodes that onnx itself gives for an operator, with the attributes that the node has or the schema says.

    Those of some operators depend on the types of the inputs, which are known in the outermost graph.
    """
    try:
        schema: Any = onnx.defs.get_schema(node.op_type, version, domain)
    except onnx.defs.SchemaError:
        return None
    versions = [one for one in schema.function_opset_versions if one <= version]
    if versions:
        text = schema.get_function_with_opset_version(max(versions))
    else:
        versions = [one for one in schema.context_dependent_function_opset_versions if one <= version]
        types = [scope.types.get(name) for name in node.input]
        if not versions or any(one is None and name for one, name in zip(types, node.input, strict=True)):
            return None
        kinds = [(one or TypeProto()).SerializeToString() for one in types]
        text = schema.get_context_dependent_function_with_opset_version(max(versions), node.SerializeToString(), kinds)
    function = FunctionProto.FromString(text)
    if not function.node:
        return None
    if not function.opset_import:
        function.opset_import.add(domain="", version=version)
    given = {
        name: attribute.default_value
        for name, attribute in schema.attributes.items()
        if attribute.default_value.type != AttributeProto.UNDEFINED
    }
    for name, value in given.items():
        value.name = name
    given.update(own_attributes(node, scope.attributes))
    return function, given
