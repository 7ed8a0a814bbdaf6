"""Gradients of operators that a program defines by ONNX nodes, as ORTModule's `register_gradient` took them.

While a graph of an ORTModule is traced, the operator's forward is torch's own, and its backward one operator that holds
the nodes as text; the lowering of that writes them. The text is an argument, and so part of the graph key.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import onnx_ir as ir
import torch

from ort_dynamo import LoweringContext
from ort_dynamo.embedding import named_lowering, onnx_dtype
from ort_dynamo.training.torch_internals import (
    AUTOGRAD_KEYS,
    OpOverload,
    forget_dispatch,
    is_absent,
    namespace,
    python_kernels,
    without_python_kernels,
)

__all__ = ["custom_gradients", "register_gradient", "registered_gradients"]

GradientNode = tuple[Any, ...]
"""(operator or (operator, domain), inputs, outputs) or the same with attributes."""

_F = TypeVar("_F", bound=Callable[[], Sequence[GradientNode]])

_ATEN = "org.pytorch.aten"

_LIBRARY = torch.library.Library("ort_dynamo_training", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "custom_gradient(Tensor[] gradients, Tensor[] inputs, Tensor[] outputs, str definition) -> Tensor[]"
)


@torch.library.impl(_LIBRARY, "custom_gradient", "CompositeExplicitAutograd")
def _run(*args: Any) -> NoReturn:
    raise NotImplementedError(
        "the gradient is defined by ONNX nodes, and ONNX Runtime cannot run them: see the warnings above"
    )


@torch.library.register_fake("ort_dynamo_training::custom_gradient", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _fake(
    gradients: list[torch.Tensor], inputs: list[torch.Tensor], outputs: list[torch.Tensor], definition: str
) -> list[torch.Tensor]:
    return [torch.empty_like(inputs[index]) for index in json.loads(definition)["wanted"]]


class _Thread(threading.local):
    """The state of one thread.

    Attributes:
        traces: whether it traces a graph of an ORTModule.
        inside: the operator that is on its way to torch's own kernel.
    """

    traces: bool = False
    inside: OpOverload | None = None


_thread = _Thread()
_DEFINED: dict[OpOverload, tuple[GradientNode, ...]] = {}
_registrations: list[OpOverload] = []


def register_gradient(domain: str, name: str, *attributes: str) -> Callable[[_F], _F]:
    """Define the gradient of an operator by ONNX nodes, for ORTModules that are created later.

    It stays for the whole process. After that, torch cannot trace a `torch.func` transform of the operator, such as
    `jacfwd`, inside a compiled function.

    Args:
        domain: "org.pytorch.aten" with the name "ATen" for an operator of torch, or "" for one of ONNX.
        name: "ATen", or the name of an operator that torch has in lower case, such as "Cos".
        attributes: for "ATen", the operator and its overload, such as "embedding", "".

    Returns:
        A decorator that returns the function unchanged. The function has no parameters and returns the nodes, in order,
        as tuples: (operator or (operator, domain), names of inputs, names of outputs), optionally with a dict of
        attributes, each {"value": …, "dtype": …, "is_tensor": …}. GO(i) is the gradient of result i, I(i) tensor
        argument i, O(i) result i. The output GI(i) is the gradient of tensor argument i. Other names are free.

    Raises:
        ValueError: torch has no such operator, or a node is an ATen. For computations in torch, use
            torch.library.custom_op or torch.autograd.Function.
    """
    overload = _find(domain, name, attributes)

    def register(function: _F) -> _F:
        nodes = tuple(tuple(node) for node in function())
        if any(_type_and_domain(node)[1] == _ATEN for node in nodes):
            raise ValueError(
                f"the gradient of {overload} has a node of {_ATEN}; define it by torch.library or by a "
                "torch.autograd.Function, which are traced"
            )
        if overload not in _DEFINED:
            _install(overload)
        _DEFINED[overload] = nodes
        _registrations.append(overload)
        return function

    return register


def registered_gradients() -> int:
    """Count the registrations, an operator's second one included."""
    return len(_registrations)


def _find(domain: str, name: str, attributes: Sequence[str]) -> OpOverload:
    operator, overload = (*attributes, "", "")[:2] if domain == _ATEN else (name.lower(), "")
    found = getattr(getattr(namespace("aten"), operator, None), overload or "default", None)
    if domain not in ("", _ATEN) or found is None or is_absent(found):
        raise ValueError(f"torch has no operator {domain or 'ONNX'}::{'::'.join([name, *attributes])}")
    return found


def _type_and_domain(node: GradientNode) -> tuple[str, str]:
    return (node[0], "") if isinstance(node[0], str) else tuple(node[0])


@contextmanager
def custom_gradients() -> Iterator[None]:
    """Trace with the gradients that are registered, in this thread, while the context is open."""
    before, _thread.traces = _thread.traces, True
    try:
        yield
    finally:
        _thread.traces = before


def _install(overload: OpOverload) -> None:
    """Put a kernel before torch's own, for good; it does nothing outside of `custom_gradients`."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        tensors = [value for value in args if isinstance(value, torch.Tensor)]
        if not _thread.traces or _thread.inside is overload or not any(t.requires_grad for t in tensors):
            with without_python_kernels():
                return overload(*args, **kwargs)
        return _Defined.apply(overload, kwargs, args, *tensors)  # type: ignore[no-untyped-call]

    table = python_kernels(overload)
    for key in AUTOGRAD_KEYS:
        table.setdefault(key, kernel)
    forget_dispatch(overload)


class _Defined(torch.autograd.Function):
    """An operator whose gradient is defined by nodes."""

    @staticmethod
    def forward(
        ctx: Any, overload: OpOverload, kwargs: Mapping[str, Any], args: Sequence[Any], *tensors: torch.Tensor
    ) -> Any:
        before, _thread.inside = _thread.inside, overload
        try:
            results = overload(*args, **kwargs)
        finally:
            _thread.inside = before
        outputs = results if isinstance(results, tuple) else (results,)
        ctx.save_for_backward(*tensors, *outputs)
        ctx.count = len(tensors)
        ctx.overload = overload
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        inputs, outputs = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
        nodes = _DEFINED[ctx.overload]
        made = [name for node in nodes for name in node[2]]
        wanted = [index for index in range(ctx.count) if f"GI({index})" in made and ctx.needs_input_grad[3 + index]]
        definition = json.dumps({"nodes": nodes, "wanted": wanted})
        operator = namespace("ort_dynamo_training").custom_gradient.default
        found = operator(list(gradients), list(inputs), list(outputs), definition)
        by_index = dict(zip(wanted, found, strict=True))
        return (None, None, None, *(by_index.get(index) for index in range(ctx.count)))


@named_lowering("ort_dynamo_training.custom_gradient.default")
def _lower(
    ctx: LoweringContext, gradients: list[ir.Value], inputs: list[ir.Value], outputs: list[ir.Value], definition: str
) -> tuple[ir.Value, ...]:
    """custom_gradient(Tensor[] gradients, Tensor[] inputs, Tensor[] outputs, str definition) -> Tensor[]."""
    read = json.loads(definition)
    values: dict[str, ir.Value] = {}
    for letter, given in (("GO", gradients), ("I", inputs), ("O", outputs)):
        values |= {f"{letter}({index})": value for index, value in enumerate(given)}
    for node in read["nodes"]:
        op_type, domain = _type_and_domain(node)
        if unknown := [name for name in node[1] if name and name not in values]:
            raise ctx.refuse(f"the gradient's node {op_type} reads {unknown[0]!r}, which no node computes")
        attributes = {key: _attribute(ctx, spec, inputs, outputs) for key, spec in (node[3:] or [{}])[0].items()}
        builder = ctx.builder.opset(domain, 1) if domain else ctx.op
        arguments = [values[name] if name else None for name in node[1]]
        results = getattr(builder, op_type)(*arguments, _outputs=len(node[2]), **attributes)
        values.update(zip(node[2], results if isinstance(results, (tuple, list)) else [results], strict=True))
    return tuple(values[f"GI({index})"] for index in read["wanted"])


_DTYPES = {
    "float": ir.DataType.FLOAT,
    "double": ir.DataType.DOUBLE,
    "float16": ir.DataType.FLOAT16,
    "bfloat16": ir.DataType.BFLOAT16,
    "int": ir.DataType.INT64,
    "int32": ir.DataType.INT32,
    "int64": ir.DataType.INT64,
    "bool": ir.DataType.BOOL,
}


def _attribute(
    ctx: LoweringContext, spec: Mapping[str, Any], inputs: Sequence[ir.Value], outputs: Sequence[ir.Value]
) -> Any:
    """Return the value of an attribute; a tensor where the definition says that it is one."""
    if not spec.get("is_tensor", False):
        return spec["value"]
    named = str(spec["dtype"])
    if named.startswith(("IElemType(", "OElemType(")):
        values = inputs if named[0] == "I" else outputs
        dtype = onnx_dtype(ctx.dtype(values[int(named.removesuffix(")").partition("(")[2])]))
    elif named in _DTYPES:
        dtype = _DTYPES[named]
    else:
        raise ctx.refuse(f"the gradient has an attribute of unknown type {named!r}")
    return ir.tensor(spec["value"], dtype=dtype)
