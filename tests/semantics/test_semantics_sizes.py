"""Sizes that change, that are symbols, that depend on data: compiled against eager."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch.utils._pytree import tree_leaves

from ort_dynamo.testing import assert_close

SIZES = [(3, 4), (5, 4), (5, 7), (2, 2), (1, 4), (3, 1), (0, 4), (6, 0)]


@pytest.fixture
def captured() -> Iterator[None]:
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        yield


def like_eager(
    function: Callable[..., Any], *calls: tuple[Any, ...], dynamic: bool | None = None, gradients: bool = True
) -> None:
    """The same compiled function on all calls, each against eager: outputs, and gradients of all inputs."""
    compiled = torch.compile(function, backend="ort_train", dynamic=dynamic, fullgraph=True)
    for call in calls:
        results = []
        for run in (function, compiled):
            inputs = [
                a.detach().requires_grad_(gradients and a.is_floating_point()) if isinstance(a, torch.Tensor) else a
                for a in call
            ]
            torch.manual_seed(0)
            outputs = tree_leaves(run(*inputs))
            wanted = [i for i in inputs if isinstance(i, torch.Tensor) and i.requires_grad]
            some = [o for o in outputs if isinstance(o, torch.Tensor) and o.requires_grad]
            found: Any = ()
            if wanted and some:
                found = torch.autograd.grad([o.sin().sum() for o in some], wanted, allow_unused=True)
            results.append([*outputs, *found])
        for index, (theirs, mine) in enumerate(zip(*results, strict=True)):
            theirs, mine = (t.detach() if isinstance(t, torch.Tensor) else t for t in (theirs, mine))
            assert_close(mine, theirs, f"value {index} of {[getattr(a, 'shape', a) for a in call]}", strides=False)


def normals(*sizes: tuple[int, ...]) -> list[tuple[torch.Tensor, ...]]:
    return [(torch.randn(size),) for size in sizes]


# -- sizes that change -------------------------------------------------------------------------------------------


def changing() -> dict[str, Callable[[torch.Tensor], Any]]:
    def reshaped(x: torch.Tensor) -> Any:
        b, n = x.shape
        return x.reshape(n * b), x.reshape(n, b), x.view(b, 1, n).expand(b, 2, n), x.flatten().unsqueeze(0)

    def sizes_as_numbers(x: torch.Tensor) -> Any:
        return x / max(x.shape[0], 1) + x.numel() * 0.5, x.shape[0] * 2, x.size(), x.sum() * x.shape[-1]

    def created(x: torch.Tensor) -> Any:
        b, n = x.shape
        return (
            x + torch.arange(n),
            torch.zeros(b, n + 1),
            torch.full((n,), b),
            x.new_ones(b * 2),
            torch.ones_like(x),
            torch.eye(b, n),
            torch.linspace(0, 1, n + 2) * b,
        )

    def joined(x: torch.Tensor) -> Any:
        return torch.cat([x, x * 2, x[:, :1]], dim=1), torch.stack([x, -x]), x.repeat(2, 3), x.repeat_interleave(2, 0)

    def sliced(x: torch.Tensor) -> Any:
        b, n = x.shape
        return x[: b // 2], x[:, n // 2 :], x[b // 2 :: 2], x[-1:], x.narrow(1, 0, n // 2), F.pad(x, (n // 2, 1))

    def reduced(x: torch.Tensor) -> Any:
        return x.sum(0), x.sum(), x.mean((0, 1)), x.amax(1, keepdim=True), x.softmax(1), x.cumsum(0), x.norm()

    def multiplied(x: torch.Tensor) -> Any:
        return x @ x.t(), torch.bmm(x.unsqueeze(0), x.t().unsqueeze(0)), torch.einsum("bn,cn->bc", x, x)

    def masked(x: torch.Tensor) -> Any:
        n = x.shape[1]
        return x.masked_fill(torch.ones(n, dtype=torch.bool).triu(1) if n < 0 else x > 0, 0.0), torch.where(x > 0, x, n)

    def attended(x: torch.Tensor) -> Any:
        q = x.unsqueeze(0).unsqueeze(0)
        return F.scaled_dot_product_attention(q, q, q, is_causal=True), x.triu(), x.tril(-1)

    def gathered(x: torch.Tensor) -> Any:
        index = torch.arange(x.shape[0]).flip(0)
        return x[index], x.index_select(0, index), x.gather(1, x.argsort(1)), x.flip(0, 1), x.roll(1, 0)

    def normalized(x: torch.Tensor) -> Any:
        return F.layer_norm(x, x.shape[1:], eps=0.1), F.normalize(x + 3, dim=-1)

    return {name: f for name, f in locals().items() if callable(f)}


@pytest.mark.parametrize("function", changing().values(), ids=changing())
def test_a_function_called_with_many_sizes(function: Callable[[torch.Tensor], Any]) -> None:
    refuses_empty = function.__name__ in ("gathered", "attended", "reduced")
    sizes = [size for size in SIZES if 0 not in size or not refuses_empty]
    torch._dynamo.config.patch(recompile_limit=30)(like_eager)(function, *normals(*sizes))


def test_a_rank_that_changes() -> None:
    like_eager(lambda x: (x * 2).sum(-1), *normals((3,), (2, 3), (2, 3, 4), (3,), (5, 3)))


def test_guards_on_sizes() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 4:
            return x.sum(0)
        if x.shape[0] % 2:
            return x.prod(0)
        return x.sin()

    like_eager(function, *normals((2, 3), (3, 3), (4, 3), (5, 3), (9, 3), (7, 3)), dynamic=True)


def test_numbers_that_change() -> None:
    calls = [(torch.randn(3), n, f) for n, f in ((2, 0.5), (3, 0.25), (7, -1.0), (0, 0.0), (1, 1.0), (4, float("inf")))]
    like_eager(lambda x, n, f: (x * n + f, x.detach() ** n, x.roll(n), torch.full((n,), f), n * 3, f * 2), *calls)


def test_marked_dimensions_compile_once() -> None:
    compiled = torch.compile(lambda x: x.exp().sum(1), backend="ort_train")
    for batch in (3, 5, 8):
        x = torch.randn(batch, 4)
        torch._dynamo.mark_dynamic(x, 0)
        assert_close(compiled(x), x.exp().sum(1), "the sum")
    assert counters["ort_train"]["graphs"] == 1


def test_sizes_that_divide_each_other_need_no_graph_of_their_own() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(-1).view(x.shape[1], x.shape[0]).cos()

    like_eager(function, *normals((5, 7), (3, 3), (2, 3), (8, 16), (9, 2)), dynamic=True)
    assert counters["stats"]["unique_graphs"] == 1


def test_past_the_limit_of_recompiles_eager_runs() -> None:
    with torch._dynamo.config.patch(recompile_limit=2):
        compiled = torch.compile(lambda x, flag: x * 2 if flag == "a" else x + len(flag), backend="ort_train")
        for flag in ("a", "bb", "ccc", "dddd", "a"):
            x = torch.randn(3)
            assert_close(compiled(x, flag), x * 2 if flag == "a" else x + len(flag), "the result")


def test_graph_breaks_between_islands() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        torch._dynamo.graph_break()
        z = y * 2
        if z.sum() > 0:  # a second break, on data
            z = z + 1
        print("", end="")
        return z.sin()

    x = torch.randn(4, requires_grad=True)
    expected = torch.autograd.grad(function(x).sum(), x)[0]
    found = torch.autograd.grad(torch.compile(function, backend="ort_train")(x).sum(), x)[0]
    assert_close(found, expected, "the gradient")
    assert counters["ort_train"]["graphs"] >= 4


# -- sizes that depend on data -----------------------------------------------------------------------------------


def by_data() -> dict[str, Callable[[torch.Tensor], Any]]:
    def masked(x: torch.Tensor) -> Any:
        chosen = x[x > 0]
        return chosen * 2, chosen.sum(), chosen.shape[0]

    def masked_select(x: torch.Tensor) -> Any:
        return torch.masked_select(x, x > 0).exp().sum()

    def nonzero(x: torch.Tensor) -> Any:
        rows = (x.sum(1) > 0).nonzero().squeeze(1)
        return x[rows] * 2, rows + 1

    def nonzero_then_matmul(x: torch.Tensor) -> Any:
        rows = torch.nonzero(x[:, 0] > 0).squeeze(1)
        y = x.index_select(0, rows)
        return y @ x.t(), y.softmax(-1), torch.cat([y, x])

    def written_back(x: torch.Tensor) -> Any:
        (rows,) = torch.where(x[:, 0] > 0)
        return torch.zeros_like(x).index_add(0, rows, x[rows].tanh())

    def item(x: torch.Tensor) -> Any:
        return x * x.sum().item() + 1

    def item_as_a_size(x: torch.Tensor) -> Any:
        n = (x > 0).sum().item()
        torch._check(n >= 0)
        return torch.zeros(n) + 1, torch.arange(n) * 2, torch.ones(n, 3).sum(0) * x.sum()

    def item_as_a_slice(x: torch.Tensor) -> Any:
        n = (x[:, 0] > 10).sum().item()
        torch._check(n >= 0)
        torch._check(n <= x.shape[0])
        return x.narrow(0, 0, n + 1) * 2

    def unique(x: torch.Tensor) -> Any:
        values, inverse = torch.unique((x > 0).long(), return_inverse=True)
        return values + 1, inverse * 2

    def split(x: torch.Tensor) -> Any:
        n = (x[:, 0] > 10).sum().item() + 1
        a, b = x.split([n, x.shape[0] - n])
        return a * 2, b.sum()

    def sorted_and_cut(x: torch.Tensor) -> Any:
        values, order = x.flatten().sort(stable=True)
        keep = values > 0
        return values[keep].exp(), order[keep]

    def reshaped(x: torch.Tensor) -> Any:
        rows = x[x[:, 0] > 0]
        return rows.reshape(-1).sum() + rows.mean(1).sum(), rows.t().contiguous(), rows.unsqueeze(1).expand(-1, 2, -1)

    def rolled(x: torch.Tensor) -> Any:
        return x.roll(3 * x[x > 0].shape[0] + 1, 0) * 2

    def random(x: torch.Tensor) -> Any:
        chosen = x[x > 0] + 1
        return F.dropout(chosen, 0.5), F.dropout(torch.cat([chosen, chosen, chosen]), 0.5), torch.rand_like(chosen)

    return {name: f for name, f in locals().items() if callable(f)}


@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize("function", by_data().values(), ids=by_data())
def test_sizes_that_depend_on_data(function: Callable[[torch.Tensor], Any]) -> None:
    torch.manual_seed(1)
    calls = [*normals((4, 5), (4, 5)), (torch.ones(4, 5),), (-torch.ones(4, 5),), *normals((6, 5))]
    like_eager(function, *calls)


@pytest.mark.usefixtures("captured")
def test_a_number_read_from_data_that_decides_nothing() -> None:
    def function(x: torch.Tensor, n: torch.Tensor) -> Any:
        k = n.item()
        return x * k, x + n.float().item(), torch.tensor(k) + 1, k

    like_eager(function, *[(torch.randn(3), torch.tensor(n)) for n in (0, 1, 5, -3)])


@pytest.mark.usefixtures("captured")
def test_a_size_that_only_a_difference_of_sizes_has() -> None:
    def function(x: torch.Tensor, n: torch.Tensor) -> Any:
        start = n.item()
        torch._check(start >= 0)
        torch._check(start <= x.shape[0])
        return x.clone()[start:].mul_(2), x.clone()[:, start:].exp_()

    like_eager(function, *[(torch.randn(rows, 9), torch.tensor(n)) for rows, n in ((5, 2), (5, 0), (5, 5), (6, 3))])


@pytest.mark.usefixtures("captured")
def test_strides_that_depend_on_data_are_kept() -> None:
    def function(x: torch.Tensor) -> Any:
        chosen = x[x > 0]
        count = chosen.shape[0]
        gaps = torch.empty_strided((count, 2), (1, count + 3)).copy_(chosen[:, None].expand(-1, 2))
        swapped = chosen.repeat(6).view(2, -1, 3).permute(0, 2, 1)
        return chosen.repeat(3).view(3, -1).T.sin(), swapped.exp(), torch.rand_like(swapped) + 1, gaps, gaps + 1

    compiled = torch.compile(function, backend="ort_train", fullgraph=True)
    for (x,) in normals((4, 5), (4, 5), (6, 5)):
        torch.manual_seed(0)
        mine = compiled(x)
        torch.manual_seed(0)
        for index, (one, other) in enumerate(zip(mine, function(x), strict=True)):
            assert_close(one, other, f"value {index} of {x.shape}")


def test_symbolic_strides_with_gaps_are_kept() -> None:
    def strided(x: torch.Tensor) -> Any:
        rows, columns = x.shape
        like = torch.empty_strided(x.shape, x.stride()).copy_(x + x)
        upright = torch.empty_strided((rows, columns), (1, rows + 3)).copy_(x * 2)
        return like, like + 1, upright, upright.as_strided((rows,), (1,)) + 1

    whole = torch.randn(16, 16)
    compiled = torch.compile(strided, backend="ort_train", dynamic=True)
    for x in (whole[:, :8], whole[:, :5], whole, whole[:, :9], whole[:7]):
        x = x.detach().requires_grad_()
        mine, theirs = compiled(x), strided(x)
        for index, (one, other) in enumerate(zip(mine, theirs, strict=True)):
            assert_close(one.detach(), other.detach(), f"value {index} of {x.shape}")
        mine, theirs = (torch.autograd.grad(sum(y.sin().sum() for y in results), x)[0] for results in (mine, theirs))
        assert_close(mine, theirs, f"gradient of {x.shape}", strides=False)


def test_a_size_that_is_rounded_up_to_a_multiple_is_computed_outside_of_islands() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = x.shape[0]
        size = rows * math.ceil(23 / rows)
        padded = F.pad(x, (0, 0, 0, size - rows))
        return torch.view_as_complex(padded.unflatten(-1, (-1, 2))).abs().sin(), torch.ones(size)

    compiled = torch.compile(function, backend="ort_train", dynamic=True)
    for rows in (5, 7):
        x = torch.randn(rows, 4)
        for mine, theirs in zip(compiled(x), function(x), strict=True):
            assert_close(mine, theirs, "a result")


_ROUNDED: dict[str, Callable[[int], int]] = {
    "up": lambda rows: math.ceil(rows / 2),
    "down": lambda rows: math.floor(rows * 0.7),
    "to the nearest": lambda rows: round(rows * 0.5),
    "towards zero": lambda rows: 9 + int(-rows * 0.3),
    "to a decimal": lambda rows: int(round(rows / 3, 1)),
    "a product of floats": lambda rows: int(rows * 0.7 * 10),
    "a square of a float": lambda rows: int((rows * 0.5) * (rows * 0.25)),
    "a root as a power": lambda rows: int(rows**0.5),
    "a root": lambda rows: int(math.sqrt(rows)),
    "a function": lambda rows: 3 + int(9 * math.tanh(rows / 20)),
}


def _like_eager_in_sessions(function: Callable[[torch.Tensor], Any]) -> None:
    options = {"placement": "onnxruntime", "fallback": "error"}
    compiled = torch.compile(function, backend="ort_train", dynamic=True, options=options)
    for rows in (9, 15, 25, 7):
        x = torch.randn(rows, 4, requires_grad=True)
        results = []
        for outputs in (function(x), compiled(x)):
            results.append((*outputs, *torch.autograd.grad([one.sum() for one in outputs], x)))
        for index, (theirs, mine) in enumerate(zip(*results, strict=True)):
            assert_close(mine.detach(), theirs.detach(), f"value {index} of {rows} rows")


@pytest.mark.parametrize("rounded", _ROUNDED.values(), ids=_ROUNDED)
def test_a_size_that_is_rounded(rounded: Callable[[int], int]) -> None:
    def function(x: torch.Tensor) -> Any:
        size = rounded(x.shape[0])
        part = x[:1] * torch.arange(size)[:, None]
        return part.sin().sum(0) * size, F.pad(x, (0, 0, 0, size)).var(0), part.cumsum(0)

    _like_eager_in_sessions(function)


@pytest.mark.parametrize(
    "name", ["up", "down", "to the nearest", "towards zero", "a square of a float", "a root as a power", "a root"]
)
def test_a_session_computes_a_product_of_rounded_sizes(name: str) -> None:
    def function(x: torch.Tensor) -> Any:
        size = _ROUNDED[name](x.shape[0]) + 2
        image = (x[:1, :1] * torch.arange(size)[:, None] + torch.arange(size)).sin()
        return (F.conv2d(image[None, None], torch.ones(1, 1, 3, 3)).flatten(2).sum(-1),)

    _like_eager_in_sessions(function)


@pytest.mark.parametrize("placement", ["fastest", "onnxruntime"])
def test_sizes_made_of_a_rounded_product_are_computed_in_its_order(placement: str) -> None:
    """sympy makes 7.0 times the size of it, which is 21 for 3 rows, not 20."""

    def function(x: torch.Tensor) -> Any:
        rows = torch.cat([x[:1], x[:1].expand(int(x.shape[0] * 0.7 * 10), -1)]).exp()
        return rows[1:].mean(0) * rows.shape[0], rows.std()

    compiled = torch.compile(function, backend="ort_train", dynamic=True, options={"placement": placement})
    for count in (4, 3, 6, 7, 12):
        x = torch.randn(count, 4, requires_grad=True)
        expected, found = (
            (*outputs, *torch.autograd.grad([one.sum() for one in outputs], x))
            for outputs in (function(x), compiled(x))
        )
        for index, (theirs, mine) in enumerate(zip(expected, found, strict=True)):
            assert_close(mine.detach(), theirs.detach(), f"value {index} of {count} rows")


def test_a_constant_dividend_without_elements() -> None:
    like_eager(lambda x, y: (torch.zeros(0, 1) / x) * y, (torch.ones(0, 1), torch.ones(0, 3)))
