"""Checks for tests of lowerings and models: compiled against eager, from the same seed."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import onnx
import onnx.printer
import onnx.shape_inference
import onnx_ir as ir
import torch

from ort_dynamo.targets.target import Target
from ort_dynamo.torch_internals.pytree import tree_leaves, tree_map
from ort_dynamo.torch_internals.tracing.dynamo import counters

__all__ = [
    "TOLERANCES",
    "Tolerance",
    "assert_close",
    "assert_like_eager",
    "assert_rewrites",
    "copied",
    "eager_reasons",
    "observe",
    "patch_facts",
    "saved_for_backward",
]


@dataclass(frozen=True)
class Tolerance:
    """|actual - expected| <= relative * max|expected| + absolute, for the whole tensor."""

    relative: float
    absolute: float


TOLERANCES: dict[torch.dtype, Tolerance] = {
    torch.float64: Tolerance(1e-10, 1e-12),
    torch.float32: Tolerance(2e-5, 1e-6),
    torch.float16: Tolerance(4e-3, 1e-3),
    torch.bfloat16: Tolerance(3e-2, 1e-2),
}
"""The one table of tolerances; integers and bools must be equal."""


def assert_close(
    actual: Any, expected: Any, what: str, tolerance: Tolerance | None = None, strides: bool = True
) -> None:
    """Compare two values: type first, then dtype, shape, device and (with `strides`) strides, then the numbers.

    NaN equals NaN, and infinities must have the same sign.

    Raises:
        AssertionError: naming `what` and the first difference.
    """
    if not isinstance(expected, torch.Tensor):
        assert actual == expected, f"{what}: {actual!r} is not {expected!r}"
        return
    assert isinstance(actual, torch.Tensor), f"{what} is {type(actual).__name__}, eager gives a tensor"
    for fact in ("dtype", "shape", "device", "layout"):
        mine, theirs = getattr(actual, fact), getattr(expected, fact)
        assert mine == theirs, f"{what} has {fact} {mine}, eager has {theirs}"
    if expected.layout is not torch.strided:
        actual, expected = actual.to_dense(), expected.to_dense()
    mine, theirs = _significant_strides(actual), _significant_strides(expected)
    assert mine == theirs or not strides, f"{what} has strides {actual.stride()}, eager has {expected.stride()}"
    if expected.numel() == 0:
        return
    if not (expected.is_floating_point() or expected.is_complex()):
        wrong = int((actual != expected).sum())
        assert wrong == 0, f"{what}: {wrong} of {expected.numel()} entries differ from eager's"
        return
    limit = tolerance or TOLERANCES.get(expected.dtype, TOLERANCES[torch.float32])
    finite = torch.isfinite(expected)
    same = torch.where(finite, True, (actual == expected) | (actual.isnan() & expected.isnan()))
    assert bool(same.all()), f"{what}: {int((~same).sum())} infinite or NaN entries differ from eager's"
    if not bool(finite.any()):
        return
    error = (actual - expected)[finite].abs().max().item()
    scale = expected[finite].abs().max().item()
    assert error <= limit.relative * scale + limit.absolute, f"{what}: off by {error:.3g}, largest entry {scale:.3g}"


def assert_like_eager(
    function: Callable[..., Any],
    *args: Any,
    gradients: bool = True,
    dynamic: bool | None = None,
    options: Mapping[str, Any] | None = None,
    allow_eager: bool = False,
    tolerance: Tolerance | None = None,
    seed: int = 0,
) -> None:
    """Run `function(*args)` in eager and compiled with ort_train, and compare everything observable.

    Compared are the outputs; with `gradients`, the gradients of all floating-point tensor arguments that require them
    and of a module's parameters, for random cotangents; and arguments and buffers after the call (mutation).

    Args:
        function: a function or module; a module is deep-copied for each run.
        args: its arguments, copied for each run. Tensors keep requires_grad and strides.
        gradients: also run the backward.
        dynamic: torch.compile's `dynamic`.
        options: torch.compile's `options`.
        allow_eager: allow fallbacks; otherwise they fail the check.
        tolerance: replaces the tolerance of the table.
        seed: the seed of torch's generator, set before each run.

    Raises:
        AssertionError: with the difference.
    """
    torch.compiler.reset()
    counters.clear()
    compile_ = partial(
        torch.compile,
        backend="ort_train",
        dynamic=dynamic,
        options=dict(options) if options else None,
        fullgraph=True,
    )
    expected = observe(function, args, seed, gradients)
    actual = observe(function, args, seed, gradients, compile_)
    if gradients:
        some = any(what.startswith("gradient") for what in expected)
        assert some, "no output or no argument requires a gradient; pass gradients=False"
    assert counters["ort_train"]["graphs"] > 0, "nothing was compiled"
    if not allow_eager:
        assert not eager_reasons(), f"nodes stay in eager: {eager_reasons()}"
    assert actual.keys() == expected.keys(), f"{sorted(actual)} is not {sorted(expected)}"
    for what, value in expected.items():
        # AOTAutograd lays a cotangent out like its output, eager does not: strides of gradients follow them.
        assert_close(actual[what], value, what, tolerance, strides=not what.startswith("gradient"))


def assert_rewrites(
    pass_: ir.passes.InPlacePass, before: str, after: str, metadata: Mapping[str, Mapping[str, str]] = {}
) -> None:
    """Check that a pass turns the model of text `before` into the model of text `after`.

    Args:
        pass_: the pass.
        before: the model before.
        after: the model after.
        metadata: name of a value -> metadata of the node that makes it, which the text cannot say.

    Texts are ONNX's own syntax. Where they differ, the pass must say `modified`, where not, not; a second run must
    change nothing; and the result must be valid ONNX.

    Raises:
        AssertionError: with both texts.
    """
    model = ir.from_proto(onnx.shape_inference.infer_shapes(ir.to_proto(ir.from_onnx_text(before))))
    for node in model.graph:
        node.metadata_props.update(metadata.get(node.outputs[0].name or "", {}))
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    result = pass_(model)
    found, wanted = (_text(ir.to_proto(m)) for m in (model, ir.from_onnx_text(after)))
    assert found == wanted, f"the pass made\n{found}\nnot\n{wanted}"
    assert result.modified == (_text(ir.to_proto(ir.from_onnx_text(before))) != found), "`modified` is wrong"
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    assert not pass_(model).modified, "a second run says it changed something"
    assert _text(ir.to_proto(model)) == found, "a second run changed something"


def _text(model: onnx.ModelProto) -> str:
    _strip(model.graph)
    return onnx.printer.to_text(model)


def _strip(graph: onnx.GraphProto) -> None:
    """Remove the parts that texts of tests leave out: names and metadata of nodes, types between them."""
    del graph.value_info[:]
    for node in graph.node:
        del node.metadata_props[:]
        node.name = ""
        for attribute in node.attribute:
            if attribute.HasField("g"):
                _strip(attribute.g)


@contextmanager
def saved_for_backward(*own: torch.Tensor) -> Iterator[dict[int, int]]:
    """Record the tensors that autograd saves inside the context: address of an allocation -> its bytes.

    Allocations of `own` do not count. Autograd does not check under hooks whether a saved tensor has been written to.
    """
    skipped = {tensor.untyped_storage().data_ptr() for tensor in own}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in skipped:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept


def patch_facts(patch: Any, **facts: Any) -> None:
    """Replace facts in the profiles of all targets, until pytest's MonkeyPatch `patch` is undone."""
    before = vars(Target)["facts"]
    read = before.func if isinstance(before, cached_property) else before.fget
    patch.setattr(Target, "facts", property(lambda target: dataclasses.replace(read(target), **facts)))


def eager_reasons() -> dict[str, int]:
    """Give the fallbacks since the counters were cleared: "<target>: <reason>" -> nodes."""
    return dict(counters["ort_train_eager"])


def observe(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    seed: int,
    gradients: bool = True,
    compile_: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda f: f,
) -> dict[str, Any]:
    """Run `compile_(function)(*args)` on copies; give everything observable, by name.

    Args:
        function: a function or module; a module is deep-copied.
        args: its arguments; tensors anywhere in them are copied with their strides and requires_grad.
        seed: of torch's generator.
        gradients: also run the backward, for random cotangents, if an output and a leaf require gradients.
        compile_: makes the callable from the copied function.

    Returns:
        "output i", "buffer name", "gradient of argument i" or "of parameter name", and "argument i after".
    """
    subject = copy.deepcopy(function) if isinstance(function, torch.nn.Module) else function
    inputs = tree_map(copied, args)
    torch.manual_seed(seed)
    outputs = tree_leaves(compile_(subject)(*inputs))
    seen = {f"output {index}": _detached(output) for index, output in enumerate(outputs)}
    leaves = {f"argument {i}": leaf for i, leaf in enumerate(tree_leaves(inputs)) if isinstance(leaf, torch.Tensor)}
    if isinstance(subject, torch.nn.Module):
        leaves |= {f"parameter {name}": p for name, p in subject.named_parameters()}
        seen |= {f"buffer {name}": _detached(b) for name, b in subject.named_buffers()}
    wanted = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad and leaf.is_leaf}
    differentiable = [o for o in outputs if isinstance(o, torch.Tensor) and o.requires_grad]
    if gradients and wanted and differentiable:
        generator = torch.Generator().manual_seed(seed + 1)
        cotangents = [torch.randn(o.shape, dtype=_float_dtype(o), generator=generator).to(o) for o in differentiable]
        found = torch.autograd.grad(differentiable, list(wanted.values()), cotangents, allow_unused=True)
        seen |= {f"gradient of {name}": g for name, g in zip(wanted, found, strict=True)}
    return seen | {f"{name} after": _detached(leaf) for name, leaf in leaves.items()}


def _float_dtype(output: torch.Tensor) -> torch.dtype:
    return torch.complex64 if output.is_complex() else torch.float32


def copied(value: Any) -> Any:
    """Copy a tensor with its strides and requires_grad; return anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.layout is not torch.strided:
        return value.detach().clone().requires_grad_(value.requires_grad)
    with torch.no_grad():
        # clone() would make an expanded or sliced tensor dense; the tests check strides, too.
        storage = value.untyped_storage().clone()  # type: ignore[no-untyped-call]
        made = torch.empty(0, dtype=value.dtype, device=value.device)
        made.set_(storage, value.storage_offset(), value.shape, value.stride())
    return made.requires_grad_(value.requires_grad)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _significant_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    if tensor.numel() <= 1:
        return ()
    return tuple(stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)
