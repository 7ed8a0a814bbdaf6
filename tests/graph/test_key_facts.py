"""Tests of cache keys: facts about sizes enter a key exactly if they change the built model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import onnx_ir as ir
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch.fx import GraphModule
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.proxy_tensor import make_fx

import ort_dynamo.backend  # noqa: F401  # registers the backend
from ort_dynamo.cache.open_island import CACHE
from ort_dynamo.errors import IntegerDivisionByZeroError
from ort_dynamo.graph.graph_key import graph_key
from ort_dynamo.lowering.translate import lower, refusal
from ort_dynamo.runtime.installed.providers import find_target
from ort_dynamo.segment.segment import segment
from ort_dynamo.torch_internals.sizes import size_guards
from ort_dynamo.torch_internals.sizes.symbols import known_true

aten = torch.ops.aten
CPU = torch.device("cpu")

GUARDS: dict[str, Callable[[Any, Any], Any]] = {
    "none": lambda n, m: True,
    "n > 0": lambda n, m: n > 0,
    "n >= 0": lambda n, m: n >= 0,
    "n >= 2": lambda n, m: n >= 2,
    "n % 4 == 0": lambda n, m: n % 4 == 0,
    "n < 100": lambda n, m: n < 100,
    "n != m": lambda n, m: n != m,
    "m > 0": lambda n, m: m > 0,
}
BODIES: dict[str, Callable[[torch.Tensor, Any, Any], Any]] = {
    "floor": lambda x, n, m: x // n,
    "trunc": lambda x, n, m: torch.div(x, n, rounding_mode="trunc") + m,
    "remainder": lambda x, n, m: x % n,
    "by size": lambda x, n, m: x // x.shape[0] + n,
    "cut": lambda x, n, m: aten.constant_pad_nd(x, [-2, 0]) * n,
    "narrow": lambda x, n, m: aten.narrow_copy(x, 0, n % 3, 1),
    "nested": lambda x, n, m: x * (n % (m + 1)) + (n // 4),
    "histogram": lambda x, n, m: torch.histc(x.float(), 4, 0, m),
    "sum": lambda x, n, m: (x * n).sum() // m,
    "view": lambda x, n, m: (x * n).view(-1, 2).t().reshape(-1),
}


def trace(guards: tuple[str, ...], body: str, n: int, m: int, size: int) -> GraphModule:
    def function(x: torch.Tensor, n: Any, m: Any) -> Any:
        for guard in guards:
            assert GUARDS[guard](n, m)  # Python's branch, which torch makes a guard
        return (BODIES[body](x, n, m),)

    gm = make_fx(function, tracing_mode="symbolic")(torch.arange(size), n, m)
    gm.graph.eliminate_dead_code()
    for number, node in enumerate(gm.graph.nodes):  # a guard's own arithmetic, which is gone, has moved the names
        node._rename(f"node_{number}")
    return gm


def compiled(gm: GraphModule) -> list[tuple[str, bytes]]:
    """(key, model) of each island."""
    target = find_target("cpu")
    segmented = segment(gm, partial(refusal, target=target), CPU)
    results = []
    for island in segmented.islands.values():
        key, lowered = graph_key(island), lower(island, target)
        assert key is not None
        assert lowered.keyable
        results.append((key.digest, ir.to_proto(lowered.model).SerializeToString(deterministic=True)))
    assert results
    return results


def made(guards: tuple[str, ...], body: str, n: int, m: int, size: int) -> list[tuple[str, bytes]]:
    return compiled(trace(guards, body, n, m, size))


guards = st.lists(st.sampled_from(sorted(GUARDS)), max_size=2, unique=True).map(tuple)
bodies = st.sampled_from(sorted(BODIES))
property_test = settings(deadline=None, max_examples=25, suppress_health_check=list(HealthCheck), derandomize=True)


@property_test
@given(first=guards, second=guards, body=bodies)
def test_graphs_with_one_key_are_one_model(first: tuple[str, ...], second: tuple[str, ...], body: str) -> None:
    assume(first != second)
    one, other = made(first, body, 8, 12, 6), made(second, body, 8, 12, 6)
    for (key, model), (other_key, other_model) in zip(one, other, strict=True):
        assert (key == other_key) <= (model == other_model)


@property_test
@given(
    guards=guards, body=bodies, n=st.sampled_from([4, 16, 20]), m=st.sampled_from([3, 7]), size=st.sampled_from([8, 18])
)
def test_the_example_alone_does_not_change_a_key(guards: tuple[str, ...], body: str, n: int, m: int, size: int) -> None:
    assert made(guards, body, n, m, size) == made(guards, body, 8, 12, 6)


@contextmanager
def renamed_symbols(by: int) -> Iterator[None]:
    original = symbolic_shapes.make_symbol
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            symbolic_shapes, "make_symbol", lambda kind, number, **facts: original(kind, number + by, **facts)
        )
        yield


@property_test
@given(guards=guards, body=bodies, by=st.sampled_from([1, 100]))
def test_names_of_symbols_do_not_change_a_key(guards: tuple[str, ...], body: str, by: int) -> None:
    plain = trace(guards, body, 8, 12, 6)
    with renamed_symbols(by):
        renamed = trace(guards, body, 8, 12, 6)
    assert {n.name for n in plain.graph.nodes} == {n.name for n in renamed.graph.nodes}
    assert [key for key, _ in compiled(plain)] == [key for key, _ in compiled(renamed)]


@pytest.mark.parametrize(
    ("body", "guard"), [("floor", "n > 0"), ("remainder", "n >= 2"), ("trunc", "n > 0"), ("histogram", "m > 0")]
)
def test_a_guard_that_changes_the_model_changes_the_key(body: str, guard: str) -> None:
    ((key, model),), ((guarded_key, guarded_model),) = made((), body, 8, 12, 6), made((guard,), body, 8, 12, 6)
    assert model != guarded_model
    assert key != guarded_key


def test_a_guard_that_nothing_asks_for_does_not() -> None:
    assert made((), "cut", 8, 12, 6) == made(("n > 0", "n < 100"), "cut", 8, 12, 6)


def test_facts_about_data_dependent_sizes_change_the_key() -> None:
    def function(checked: bool, x: torch.Tensor, count: torch.Tensor) -> Any:
        n = count.item()
        if checked:
            torch._check(n > 0)
        return (x // n,)

    def keys(checked: bool) -> list[tuple[str, bytes]]:
        example = torch.arange(6), torch.tensor(3)
        return compiled(make_fx(partial(function, checked), tracing_mode="symbolic")(*example))

    ((key, model),), ((checked_key, checked_model),) = keys(False), keys(True)
    assert model != checked_model
    assert key != checked_key
    assert keys(True) == [(checked_key, checked_model)]


def test_branches_of_a_condition_enter() -> None:
    def branch(x: torch.Tensor, n: Any) -> torch.Tensor:
        return x // n

    def function(guarded: bool, x: torch.Tensor, n: Any) -> Any:
        assert not guarded or n > 0
        return (torch.cond(x.sum() > 0, lambda x: branch(x, n), lambda x: x + n, (x,)),)

    def keys(guarded: bool) -> list[tuple[str, bytes]]:
        return compiled(make_fx(partial(function, guarded), tracing_mode="symbolic")(torch.arange(6), 3))

    ((key, model),), ((guarded_key, guarded_model),) = keys(False), keys(True)
    assert model != guarded_model
    assert key != guarded_key


def test_graph_with_an_unrecorded_size_guard_is_not_keyable(monkeypatch: pytest.MonkeyPatch) -> None:
    gm = trace((), "floor", 8, 12, 6)
    target = find_target("cpu")
    segmented = segment(gm, partial(refusal, target=target), CPU)
    (island,) = segmented.islands.values()
    for node in island.graph.nodes:
        node.meta.pop(size_guards.SIZE_FACTS, None)
    monkeypatch.setattr(size_guards, "strict", False)
    assert not lower(island, target).keyable


def test_the_offset_of_an_input_enters() -> None:
    def key(x: torch.Tensor) -> Any:
        return graph_key(make_fx(lambda x: x + 1, tracing_mode="fake")(x))

    memory = torch.ones(8)
    assert key(memory[2:6]) == key(memory[2:6])
    assert key(memory[2:6]) != key(memory[3:7])


def test_a_divisor_that_may_be_zero_takes_no_session_of_one_that_may_not() -> None:
    def guarded(x: torch.Tensor, n: int) -> torch.Tensor:
        return x // n if n > 0 else x

    def plain(x: torch.Tensor, n: int) -> torch.Tensor:
        return x // n

    first, second = (torch.compile(f, backend="ort_train", dynamic=True) for f in (guarded, plain))
    x = torch.arange(6)
    for n in (3, 4):
        torch.testing.assert_close(first(x, n), x // n)
    torch.testing.assert_close(second(x, 3), x // 3)
    with pytest.raises(IntegerDivisionByZeroError):
        second(x, 0)


def test_equal_functions_share_a_session_for_different_example_sizes() -> None:
    def first(x: torch.Tensor, n: int) -> torch.Tensor:
        return (x * n).sum(0) // 3

    def second(x: torch.Tensor, n: int) -> torch.Tensor:
        return (x * n).sum(0) // 3

    before = CACHE.hits
    for function, size, n in ((first, 6, 4), (second, 9, 7)):
        x = torch.arange(size * 2).reshape(size, 2)
        compiled = torch.compile(function, backend="ort_train", dynamic=True)
        torch.testing.assert_close(compiled(x, n), function(x, n))
    assert CACHE.hits == before + 1


def test_graphs_that_use_one_part_of_a_split_share_a_session() -> None:
    def first(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kept, negated = x.chunk(2, 1)
        return -negated, kept  # a view of the input: the island has the other part alone

    def second(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kept, negated = x.chunk(2, 1)
        return -negated, kept

    before = CACHE.hits
    for function in (first, second):
        x = torch.randn(4, 6)
        for part, eager in zip(torch.compile(function, backend="ort_train", dynamic=True)(x), function(x), strict=True):
            torch.testing.assert_close(part, eager)
    assert CACHE.hits == before + 1


def test_known_true_agrees_with_torch() -> None:
    size = symbolic_shapes.ShapeEnv().create_unbacked_symint()
    torch._check(size >= 3)
    assert known_true(size > 2) == symbolic_shapes.statically_known_true(size > 2)
