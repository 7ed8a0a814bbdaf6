"""Operators that run functions: torch.cond in ONNX Runtime where its branches can, all others in eager, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters
from torch._higher_order_ops import associative_scan, scan, while_loop
from torch._higher_order_ops.map import map as map_
from torch._library.effects import EffectType

from ort_dynamo import register_lowering
from ort_dynamo.cache.open_island import CACHE
from ort_dynamo.lowering import registry
from ort_dynamo.testing import assert_close, assert_like_eager, eager_reasons


def like_eager_both_ways(function: Callable[..., Any], *shape: int, **kwargs: Any) -> None:
    x = torch.rand(*shape).requires_grad_(kwargs.get("gradients", True))
    assert_like_eager(lambda x: (function(x), function(-x)), x, **kwargs)


# -- cond --------------------------------------------------------------------------------------------------------


def conditions() -> dict[str, Callable[[torch.Tensor], Any]]:
    weight = torch.nn.Parameter(torch.randn(4))

    def plain(x: torch.Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda x: (x * 2).sin(), lambda x: x - 1, (x,))

    def with_captured_tensors(x: torch.Tensor) -> Any:
        y = x.exp()
        return torch.cond(x.sum() > 0, lambda x: F.gelu(x * weight) + y, lambda x: y * weight, (x,)) * 2

    def of_several_values(x: torch.Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda x: (x.exp(), x.sum()), lambda x: (x - 1, x.mean()), (x,))

    def nested(x: torch.Tensor) -> Any:
        def inner(x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.mean() > 0.5, lambda x: x * 3, lambda x: x.cos(), (x,))

        return torch.cond(x.sum() > 0, inner, lambda x: x - 1, (x,))

    def of_constants_and_sizes(x: torch.Tensor) -> Any:
        return torch.cond(
            x.sum() > 0, lambda x: x + torch.arange(x.shape[1]), lambda x: torch.zeros_like(x) + x.shape[0], (x,)
        )

    def twice(x: torch.Tensor) -> Any:
        y = torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x + 2, (x,))
        return torch.cond(y.sum() > 0, lambda y: y * 2, lambda y: y * 3, (y,)) + y

    def with_the_same_value_in_both(x: torch.Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda x: (x.clone(), x + 0), lambda x: (x + 0, x.clone()), (x,))

    def of_a_transposed_value(x: torch.Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda x: (x.t() @ x).t().contiguous(), lambda x: x.t() @ (x + 1), (x.t(),))

    return {name: f for name, f in locals().items() if name != "weight"}


@pytest.mark.parametrize("function", conditions().values(), ids=conditions())
def test_conditions_run_in_onnx_runtime_in_forward_and_backward(function: Callable[[torch.Tensor], Any]) -> None:
    like_eager_both_ways(function, 3, 4)


@pytest.mark.parametrize("name", ["with_captured_tensors", "of_constants_and_sizes"])
def test_conditions_with_symbolic_sizes_are_native(name: str) -> None:
    like_eager_both_ways(conditions()[name], 3, 4, dynamic=True)


@pytest.mark.parametrize(
    "predicate", [torch.tensor(5), torch.tensor(0), torch.zeros(1), torch.full((1, 1), 0.5)], ids=str
)
def test_a_condition_may_be_a_number(predicate: torch.Tensor) -> None:
    def function(predicate: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(predicate, lambda x: x.exp(), lambda x: x * 3, (x,))

    x = torch.rand(3)
    compiled = torch.compile(function, backend="ort_train", fullgraph=True)
    assert_close(compiled(predicate, x), x.exp() if predicate.bool() else x * 3, "the result")
    assert not eager_reasons()


def test_numbers_mapped_over_tensors() -> None:
    assert_like_eager(
        lambda x: torch.vmap(lambda row: row * 3.14 + row.new_tensor(2))(x), torch.rand(3, 4).requires_grad_()
    )


def test_a_branch_that_only_widens_its_input_is_native() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda y: y.float(), lambda y: y.float() * 2, (x * 2,))

    for sign in (1, -1):  # values that bfloat16 holds exactly
        assert_like_eager(function, sign * torch.arange(4, dtype=torch.bfloat16), gradients=False)


def test_a_condition_of_sizes_is_decided_when_compiled() -> None:
    function = torch.compile(
        lambda x: torch.cond(x.shape[0] > 3, lambda x: x * 2, lambda x: x - 1, (x,)), backend="ort_train", dynamic=True
    )
    for size in (2, 5, 3):
        x = torch.randn(size, 2)
        assert_close(function(x), x * 2 if size > 3 else x - 1, "the value")


def test_a_branch_that_cannot_be_lowered_keeps_the_condition_in_eager() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: torch.fft.rfft(x).real[:1] + x, lambda x: x - 1, (x * 2,)) + 1

    like_eager_both_ways(function, 4, gradients=False, allow_eager=True)
    ((reason, count),) = eager_reasons().items()
    assert reason.startswith("cond: in a branch, aten._fft_r2c.default: ")
    assert count == 2


def test_a_random_operator_in_a_branch_is_torchs() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a = torch.rand(2)
        b = torch.cond(x.sum() > 0, lambda x: F.dropout(x, 0.5), lambda x: x + torch.rand_like(x), (x,))
        return a, b, torch.rand(3)

    # Without gradients: AOTAutograd's backward of a condition runs the branch again, with new random numbers.
    like_eager_both_ways(function, 3, 4, gradients=False, allow_eager=True)


def test_branches_are_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_FROM_OUTSIDE", {})

    def condition(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: torch.cond(x.sum() > 0, lambda x: x.exp() * factor, lambda x: x - 1, (x,))

    def results(*factors: float) -> list[int]:
        misses = []
        for factor in factors:
            before = CACHE.misses
            torch._dynamo.reset_code_caches()
            found = torch.compile(condition(factor), backend="ort_train")(torch.zeros(2) + 1)
            misses.append(CACHE.misses - before)
            assert found[0].item() == pytest.approx(factor * expected)
        return misses

    expected = 2.718281828
    assert results(2.0, 3.0, 2.0) == [1, 1, 0]
    register_lowering(torch.ops.aten.exp.default, replace=True)(lambda ctx, x: ctx.op.Add(x, x))
    expected = 2.0
    assert results(2.0) == [1], "a lowering that a branch uses is part of the key"


def test_a_defect_inside_a_branch_names_the_condition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_FROM_OUTSIDE", {})
    register_lowering(torch.ops.aten.exp.default, replace=True)(lambda ctx: None)
    with pytest.raises(BackendCompilerFailed, match=r"LoweringError.*\n?.*cond"):
        torch.compile(conditions()["of_several_values"], backend="ort_train")(torch.ones(2))


# -- fallbacks ---------------------------------------------------------------------------------------------------


def loops() -> dict[str, Callable[[torch.Tensor], Any]]:
    weight = torch.nn.Parameter(torch.randn(4))

    def scanned(x: torch.Tensor) -> Any:
        return scan(lambda c, x: (c + x, (c * x).sin()), torch.zeros(4), x * 2, dim=0)

    def associatively_scanned(x: torch.Tensor) -> Any:
        return associative_scan(lambda a, b: a * b, x * 2, 0, combine_mode="generic") + 1

    def mapped(x: torch.Tensor) -> Any:
        return map_(lambda a, w: a.sin() * w, x * 2, weight) + 1

    @torch.compiler.nested_compile_region
    def region(x: torch.Tensor) -> torch.Tensor:
        return (x * weight).tanh()

    def in_a_compiled_region(x: torch.Tensor) -> Any:
        return region(region(x * 2)) + 1

    return {name: f for name, f in locals().items() if name not in ("weight", "region")}


@pytest.mark.parametrize("function", loops().values(), ids=loops())
def test_loops_and_their_gradients(function: Callable[[torch.Tensor], Any]) -> None:
    assert_like_eager(function, torch.randn(5, 4, requires_grad=True), allow_eager=True)


def test_a_while_loop() -> None:
    def function(x: torch.Tensor) -> Any:
        return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x * 2 + 1), (torch.tensor(0), x + 1))

    assert_like_eager(function, torch.randn(4), gradients=False, allow_eager=True)
    assert eager_reasons() == {"while_loop: no lowering for the higher-order operator while_loop": 1}


@pytest.mark.filterwarnings("ignore:.*flex_attention:UserWarning")
def test_flex_attention() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    q = torch.randn(1, 2, 16, 16)
    found = torch.compile(
        lambda q: flex_attention(q * 1, q, q, score_mod=lambda score, b, h, i, j: score + (i - j)), backend="ort_train"
    )(q)
    bias = torch.arange(16.0).unsqueeze(1) - torch.arange(16.0)
    assert_close(found, F.scaled_dot_product_attention(q, q, q, bias), "the attention")


@torch.library.custom_op("ort_dynamo_tests::accumulate", mutates_args=("into",))
def accumulate(into: torch.Tensor, x: torch.Tensor) -> None:
    into.add_(x)


@torch.library.custom_op("ort_dynamo_tests::double_and_add", mutates_args=("x",))
def double_and_add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.mul_(2)
    return x + y


double_and_add.register_fake(lambda x, y: torch.empty_like(x))

SEEN: list[float] = []


@torch.library.custom_op("ort_dynamo_tests::log", mutates_args=())
def log(x: torch.Tensor) -> torch.Tensor:
    SEEN.append(round(x.sum().item(), 3))
    return x * 2


log.register_fake(torch.empty_like)


def test_operators_of_the_users_that_write() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> Any:
        z = y * 1
        accumulate(z, y)
        w = z + 1
        accumulate(w[0], y[0])
        accumulate(x, w)
        return z, w, double_and_add(z, w), x * 2

    assert_like_eager(function, torch.randn(3, 4), torch.randn(3, 4), gradients=False, allow_eager=True)
    assert set(eager_reasons()) == {
        "auto_functionalized_v2: no lowering for the higher-order operator auto_functionalized_v2"
    }


@pytest.fixture
def ordered() -> Iterator[None]:
    """Let `log` have an effect, which torch orders by a token: one more input and result of each graph."""
    from torch._higher_order_ops.effects import _register_effectful_op

    handle = _register_effectful_op("ort_dynamo_tests::log", EffectType.ORDERED)
    SEEN.clear()
    yield
    handle.destroy()


@pytest.mark.usefixtures("ordered")
def test_effects_happen_in_order() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        first = log(x.exp() + 10)
        second = log(x * 3 - 10)
        return log(second * 0 + 1) + first

    assert_like_eager(function, torch.randn(3), gradients=False, allow_eager=True)
    assert len(SEEN) == 6
    assert SEEN[:3] == pytest.approx(SEEN[3:], abs=1e-3)


@pytest.mark.usefixtures("ordered")
def test_a_result_beside_an_effect_can_be_resized() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        log(x)
        return x.sin()

    x = torch.randn(4)
    result = torch.compile(function, backend="ort_train")(x)
    assert result.resize_(9).shape == (9,)


class Noted(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        log(x.detach())
        return self.norm(x * 2).tanh()


@pytest.mark.usefixtures("ordered")
def test_checkpoints_write_buffers_again_beside_an_effect() -> None:
    from torch.utils.checkpoint import checkpoint

    x = torch.randn(5, 4, requires_grad=True)
    found = []
    for compile_ in (lambda module: module, lambda module: torch.compile(module, backend="ort_train")):
        module = Noted()
        checkpoint(compile_(module), x, use_reentrant=False).square().sum().backward()
        found.append([*module.buffers()])
    torch.testing.assert_close(*found)


@torch.library.custom_op("ort_dynamo_tests::shifted", mutates_args=())
def shifted(x: torch.Tensor, count: int) -> list[torch.Tensor]:
    return [x + shift for shift in range(count)]


shifted.register_fake(lambda x, count: [torch.empty_like(x) for _ in range(count)])


@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("dynamic", [False, True])
def test_an_operator_with_an_effect_may_return_a_list(count: int, dynamic: bool) -> None:
    from torch._higher_order_ops.effects import _register_effectful_op

    def function(x: torch.Tensor) -> Any:
        parts = shifted(x * 2, count)
        return [part.clone() for part in parts], sum(part.exp() for part in parts), x + 1

    handle = _register_effectful_op("ort_dynamo_tests::shifted", EffectType.ORDERED)
    try:
        assert_like_eager(function, torch.randn(3, 4), gradients=False, allow_eager=True, dynamic=dynamic)
    finally:
        handle.destroy()


@pytest.fixture
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_process")
@pytest.mark.filterwarnings("ignore")
def test_collectives_are_torchs_by_design_in_order() -> None:
    import torch.distributed._functional_collectives as collectives

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        summed = collectives.all_reduce(y, "sum", dist.group.WORLD)
        gathered = collectives.all_gather_tensor(summed + 1, 0, dist.group.WORLD)
        dist.all_reduce(gathered)
        return gathered * 3

    assert_like_eager(function, torch.randn(4), gradients=False)  # fallback="error" takes them
    assert not eager_reasons()
    waits = counters["ort_train_by_design"]["_c10d_functional.wait_tensor.default"]
    assert (waits, counters["ort_train_by_design"].total()) == (3, 6)


@torch.library.custom_op("ort_dynamo_tests::weighted", mutates_args=(), tags=(torch.Tag.needs_contiguous_strides,))
def weighted(x: torch.Tensor, weight: float, y: torch.Tensor) -> torch.Tensor:
    assert x.is_contiguous()
    assert y.is_contiguous()
    return x * weight + y


weighted.register_fake(lambda x, weight, y: torch.empty(x.shape))


@pytest.mark.parametrize("dynamic", [False, True])
def test_an_operator_that_needs_contiguous_tensors_gets_them(dynamic: bool) -> None:
    def function(x: torch.Tensor) -> Any:
        outside = weighted(x, 2.0, x.t().t())  # an input and a view of it
        inside = weighted((x.exp() + 1).t(), 3.0, x.t() * 2)
        return outside + 1, inside, weighted(outside.t(), 1.0, inside)

    x = torch.randn(4, 3).t()
    found = torch.compile(function, backend="ort_train", dynamic=dynamic, fullgraph=True)(x)
    first = x * 3
    second = (x.exp() + 1).t() * 3 + x.t() * 2
    for mine, exact in zip(found, (first + 1, second, first.t() + second), strict=True):
        assert_close(mine, exact, "the result", strides=False)
