"""Tests of resizes traced as one operator; traces in other threads stay torch's own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from ort_dynamo.capture.whole_resizes import whole_resizes

aten = torch.ops.aten

RESIZES = [
    (mode, rank)
    for rank, modes in {
        1: ("nearest", "nearest-exact", "linear"),
        2: ("nearest", "nearest-exact", "bilinear", "bicubic"),
        3: ("nearest", "nearest-exact", "trilinear"),
    }.items()
    for mode in modes
]


def image(rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(2, 3, *(4, 5, 6)[:rank], dtype=dtype)


def resize(mode: str, rank: int) -> Callable[[Tensor], Tensor]:
    return lambda x: F.interpolate(x, size=(7, 3, 5)[:rank], mode=mode)


def gradient(mode: str, rank: int) -> Callable[[Tensor], Tensor]:
    def step(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(resize(mode, rank)(x).sum(), x)[0]

    return step


def called(function: Callable[[Tensor], Tensor], x: Tensor, tracing_mode: str = "fake") -> list[str]:
    """List the operators in a trace by the Python dispatcher, which AOTAutograd and torch.export use."""
    with enable_python_dispatcher():
        gm = make_fx(function, tracing_mode=tracing_mode)(x)
    return [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]


def in_aot_eager(function: Callable[[Tensor], Tensor], x: Tensor) -> list[str]:
    """List the operators in the forward and backward graphs of another backend."""
    found: list[str] = []

    def look(gm: GraphModule, _: Any) -> Any:
        found.extend(str(node.target) for node in gm.graph.nodes if node.op == "call_function")
        return make_boxed_func(gm)

    torch.compile(function, backend=aot_autograd(fw_compiler=look), fullgraph=True)(x.requires_grad_()).sum().backward()
    return found


def is_whole(calls: list[str]) -> bool:
    return any("upsample" in call for call in calls)


@pytest.mark.parametrize(("mode", "rank"), RESIZES)
def test_a_resize_and_its_gradient_are_whole_in_the_context_only(mode: str, rank: int) -> None:
    function, x = gradient(mode, rank), image(rank)
    before = called(function, x)
    with whole_resizes():
        inside = called(function, x)
    overload = [call for call in inside if "upsample" in call]
    assert len(overload) == 2
    assert overload[1] == overload[0].replace(".default", "_backward.default")
    assert not is_whole(before)
    assert called(function, x) == before


@pytest.mark.parametrize(
    ("x", "tracing_mode"),
    [(image(2, torch.uint8), "fake"), (image(2)[:0], "fake"), (image(2), "symbolic")],
    ids=["integers", "an empty batch", "symbolic sizes"],
)
def test_other_resizes_are_decomposed_as_torch_does(x: Tensor, tracing_mode: str) -> None:
    before = called(resize("nearest", 2), x, tracing_mode)
    with whole_resizes():
        assert called(resize("nearest", 2), x, tracing_mode) == before
    assert not is_whole(before)


def test_a_resize_by_keywords_is_torchs_in_and_outside_of_the_context() -> None:
    def function(x: Tensor) -> Tensor:
        return aten.upsample_nearest2d.vec.decompose(x, output_size=None, scale_factors=[2.0, 2.0])

    expected = function(image(2))
    with whole_resizes():
        torch.testing.assert_close(function(image(2)), expected)


@pytest.mark.parametrize("trace", [called, in_aot_eager], ids=["make_fx", "another backend"])
@pytest.mark.parametrize(("mode", "rank"), RESIZES)
def test_another_thread_traces_as_if_nobody_compiled(mode: str, rank: int, trace: Callable[..., list[str]]) -> None:
    function = gradient(mode, rank) if trace is called else resize(mode, rank)
    look = partial(trace, function, image(rank))
    alone = look()
    torch._dynamo.reset()
    with ThreadPoolExecutor(1) as other, whole_resizes():
        assert other.submit(look).result() == alone
        assert is_whole(called(gradient(mode, rank), image(rank)))


class Meanwhile(TorchDispatchMode):
    """Calls a function when a resize has reached torch's own kernel."""

    def __init__(self, function: Callable[[], None]) -> None:
        super().__init__()
        self._function = function

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.upsample_bilinear2d.default:
            self._function()
        return func(*args, **(kwargs or {}))


def test_another_thread_does_so_also_while_a_resize_is_on_its_way() -> None:
    function, x = gradient("bilinear", 2), image(2)
    alone = called(function, x)
    seen = []
    with ThreadPoolExecutor(1) as other, whole_resizes(), enable_python_dispatcher():
        meanwhile = Meanwhile(lambda: seen.append(other.submit(called, function, x).result()))
        with meanwhile:
            resize("bilinear", 2)(x)
    assert seen == [alone]


def test_contexts_nest_and_an_error_closes_them() -> None:
    function, x = gradient("bilinear", 2), image(2)
    with whole_resizes():
        with pytest.raises(RuntimeError), whole_resizes():
            F.interpolate(x, size=(0, 3), mode="bilinear")
        assert is_whole(called(function, x))
    assert not is_whole(called(function, x))


@pytest.mark.parametrize("shrink", [F.softshrink, F.hardshrink], ids=lambda shrink: shrink.__name__)
@pytest.mark.parametrize("dynamic", [False, True])
def test_shrinks_of_fixed_sizes_and_their_gradients_stay_whole(shrink: Callable[..., Tensor], dynamic: bool) -> None:
    found = set()

    def keep(gm: GraphModule, _: Any) -> Any:
        found.update(str(node.target) for node in gm.graph.nodes if node.op == "call_function")
        return make_boxed_func(gm)

    def backend(gm: GraphModule, inputs: Any) -> Any:
        with whole_resizes():
            return aot_autograd(fw_compiler=keep, bw_compiler=keep)(gm, inputs)

    x = torch.randn(3, 4, requires_grad=True)
    result = torch.compile(lambda x: shrink(x, 0.3), backend=backend, dynamic=dynamic)(x)
    torch.testing.assert_close(result, shrink(x, 0.3))
    (slope,) = torch.autograd.grad(result.sum(), x)
    torch.testing.assert_close(slope, torch.autograd.grad(shrink(x, 0.3).sum(), x)[0])
    whole = {f"aten.{shrink.__name__}.default", f"aten.{shrink.__name__}_backward.default"}
    assert found & whole == (set() if dynamic else whole)
    assert any("where" in target for target in found) == dynamic


def test_a_shrink_of_sizes_that_a_guard_made_known_is_decomposed() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        shrunk = F.hardshrink(x)
        return shrunk, F.layer_norm(shrunk, [3]) if x.shape[0] == 5 else x

    x = torch.randn(5, 3, requires_grad=True)
    results = torch.compile(function, backend="ort_train", dynamic=True)(x)
    torch.testing.assert_close(results, function(x))
    results[0].sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, (x.detach().abs() > 0.5).float())


TRANSFORMED = {
    "grad of a resize": lambda x: torch.func.grad(lambda v: F.interpolate(v, scale_factor=2).sin().sum())(x),
    "vjp of a resize": lambda x: torch.func.vjp(lambda v: F.interpolate(v, size=(5, 5), mode="bilinear"), x)[1](
        torch.ones(2, 3, 5, 5)
    )[0],
    "jvp of a resize": lambda x: torch.func.jvp(lambda v: F.interpolate(v, size=(5, 5), mode="bilinear"), (x,), (x,)),
    "vmap of a resize": lambda x: torch.func.vmap(lambda v: F.interpolate(v[None], scale_factor=2))(x),
    "grad of a shrink": lambda x: torch.func.grad(lambda v: F.softshrink(v).sin().sum())(x),
}


@pytest.mark.parametrize("name", TRANSFORMED)
@pytest.mark.filterwarnings("ignore")
def test_transforms_within_the_graph_equal_eager(name):
    x = torch.randn(2, 3, 8, 8)
    found = torch.compile(TRANSFORMED[name], backend="ort_train")(x)
    torch.testing.assert_close(found, TRANSFORMED[name](x))
