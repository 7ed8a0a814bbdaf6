"""Indices that torch's kernels for CUDA stop at stop fused kernels, too; the CPU's kernels stand for CUDA's here."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from cuda_forms import cuda_forms
from torch import Tensor

CASES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross_entropy": lambda x, i: F.cross_entropy(x, i[:, 0]),
    "cross_entropy of positions": lambda x, i: F.cross_entropy(x[..., None], i[:, :1], reduction="none"),
    "nll_loss with weights": lambda x, i: F.nll_loss(x, i[:, 0], weight=x[0].exp().detach()),
    "embedding": lambda x, i: F.embedding(i, x),
    "gather": lambda x, i: x.gather(1, i),
    "gather one": lambda x, i: x.log_softmax(1).gather(1, i[:, :1]),
    "index_select": lambda x, i: x.index_select(1, i.flatten()),
    "index_select of rows": lambda x, i: x.index_select(0, i.flatten()),
    "embedding_bag": lambda x, i: F.embedding_bag(i, x),
    "scatter": lambda x, i: x.scatter(1, i, x[:, :2].exp()),
    "scatter along rows": lambda x, i: x.scatter(0, i, x[:, :2].exp()),
    "scatter_add": lambda x, i: x.scatter_add(1, i, x[:, :2].exp()),
    "scatter_reduce": lambda x, i: x.scatter_reduce(1, i, x[:, :2].exp(), "amax"),
    "index_add": lambda x, i: x.index_add(0, i[:, 0], x.exp()),
    "index_copy": lambda x, i: x.index_copy(0, i[:, 0], x.exp()),
}
EITHER_END: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index": lambda x, i: x[i],
    "index of columns": lambda x, i: x[:, i],
    "index of entries": lambda x, i: x[torch.arange(7), i[:, 0]],
    "index of both": lambda x, i: x[i[:, 0], i[:, 1]],
    "index of the other": lambda x, i: x[i[:, 1], i[:, 0]],
    "index with int32": lambda x, i: x[i.int()],
    "index_put": lambda x, i: x.index_put((i[:, 0],), x.exp()),
    "index_put of entries": lambda x, i: x.index_put((i[:, 1], i[:, 0]), x[:, 0].exp()),
    "index_put of columns": lambda x, i: _set_columns(x, i[:, 0]),
    "index_put of sums": lambda x, i: x.index_put((i,), x[:, None].exp(), accumulate=True),
    "index_fill": lambda x, i: x.index_fill(0, i[:3, 0], 2.0) + x.index_fill(0, i[4:, 0], 1.0),
    "take": lambda x, i: x.flatten()[:7].take(i),
    "put": lambda x, i: x[0].put(i[:, 0], x[:, 1].exp()) + x,
}
"""Operators whose negative indices count from the end."""


IN_TORCH = {("embedding_bag", True), ("index_put of sums", False), ("index_put of sums", True)}
"""Bags whose number of indices is symbolic are torch's, as a maximum of nothing has no kernel; so are float sums."""


def _set_columns(x: Tensor, places: Tensor) -> Tensor:
    y = x.clone()
    y[:, places] = x.exp()
    return y


def given() -> tuple[Tensor, Tensor]:
    """A table and right indices, fresh: torch keeps on a tensor which of its sizes were symbolic once."""
    return torch.randn(7, 7, generator=torch.Generator().manual_seed(0)), torch.arange(14).reshape(7, 2) % 7


@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed", "symbolic"])
@pytest.mark.parametrize("name", [*CASES, *EITHER_END])
def test_right_indices_give_eagers_results(name: str, dynamic: bool) -> None:
    x, indices = given()
    x.requires_grad_()
    function = (CASES | EITHER_END)[name]
    if name in EITHER_END:
        indices[2:4] -= 7
    torch._dynamo.reset()
    with cuda_forms(fused=True) as found:
        result = torch.compile(function, backend="ort_train", dynamic=dynamic)(x, indices)
        (gradient,) = torch.autograd.grad(result.square().sum(), x)
    right = function(x, indices)
    torch.testing.assert_close(result, right)
    torch.testing.assert_close(gradient, torch.autograd.grad(right.square().sum(), x)[0])
    assert any(kernel.stops for kernel in found.kernels.values()) or (name, dynamic) in IN_TORCH


@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed", "symbolic"])
@pytest.mark.parametrize(
    ("name", "wrong"),
    [(name, i) for name in CASES for i in (-1, 7)] + [(name, i) for name in EITHER_END for i in (-8, 7)],
)
def test_a_wrong_index_stops_the_session(
    name: str, wrong: int, dynamic: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    x, indices = given()
    function = (CASES | EITHER_END)[name]
    torch._dynamo.reset()
    with cuda_forms(fused=True):
        run = torch.compile(function, backend="ort_train", dynamic=dynamic)
        run(x, indices)
        indices[6, 0] = wrong
        refused = "not in the valid range|out of (range|bounds)|Expected i < index_size"
        refused = refused if (name, dynamic) in IN_TORCH else "the host function gave error 1"
        with pytest.raises(Exception, match=refused):
            run(x, indices)
    if (name, dynamic) not in IN_TORCH:
        assert "IndexError: a fused kernel found an index that is out of range" in capfd.readouterr().err
    with pytest.raises((IndexError, RuntimeError)):
        function(x, indices)


SELECTED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "masked_scatter": lambda x, mask, values: x.masked_scatter(mask, values),
    "index_put of a mask": lambda x, mask, values: x.index_put((mask,), values),
}
"""Operators that take a value for each entry of a mask that is set."""


@pytest.mark.parametrize("name", SELECTED)
def test_more_entries_than_values_stop_the_session(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    x, _ = given()
    mask, values = x > 0, x[x > 0].exp()
    torch._dynamo.reset()
    with cuda_forms(fused=True):
        run = torch.compile(SELECTED[name], backend="ort_train", dynamic=False)
        torch.testing.assert_close(run(x, mask, values), SELECTED[name](x, mask, values))
        mask[tuple((x < 0).nonzero()[0])] = True
        with pytest.raises(Exception, match="the host function gave error 1"):
            run(x, mask, values)
    assert "IndexError: a fused kernel found an index that is out of range" in capfd.readouterr().err
    with pytest.raises((IndexError, RuntimeError)):
        SELECTED[name](x, mask, values)


def test_gradients_do_not_check_the_indices_again() -> None:
    def loss(x: Tensor, i: Tensor) -> Tensor:
        return x[i].exp().sum() + x.gather(1, i).sum()

    def checks() -> int:
        return sum(found.operators[name] for name, kernel in found.kernels.items() if kernel.stops)

    x, indices = given()
    x.requires_grad_()
    torch._dynamo.reset()
    with cuda_forms(fused=True) as found:
        result = torch.compile(loss, backend="ort_train", dynamic=False)(x, indices)
        in_forward = checks()
        result.backward()
    assert in_forward == checks() == 1  # one kernel checks both
