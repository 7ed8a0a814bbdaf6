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
}


def given() -> tuple[Tensor, Tensor]:
    """A table and right indices, fresh: torch keeps on a tensor which of its sizes were symbolic once."""
    return torch.randn(7, 7, generator=torch.Generator().manual_seed(0)), torch.arange(14).reshape(7, 2) % 7


@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed", "symbolic"])
@pytest.mark.parametrize("name", CASES)
def test_right_indices_give_eagers_results(name: str, dynamic: bool) -> None:
    x, indices = given()
    x.requires_grad_()
    torch._dynamo.reset()
    with cuda_forms(fused=True) as found:
        result = torch.compile(CASES[name], backend="ort_train", dynamic=dynamic)(x, indices)
        (gradient,) = torch.autograd.grad(result.square().sum(), x)
    right = CASES[name](x, indices)
    torch.testing.assert_close(result, right)
    torch.testing.assert_close(gradient, torch.autograd.grad(right.square().sum(), x)[0])
    if not dynamic:  # a symbolic size is no limit
        assert any(kernel.stops for kernel in found.kernels.values())


@pytest.mark.parametrize("wrong", [-1, 7])
@pytest.mark.parametrize("name", CASES)
def test_a_wrong_index_stops_the_session(name: str, wrong: int, capfd: pytest.CaptureFixture[str]) -> None:
    x, indices = given()
    torch._dynamo.reset()
    with cuda_forms(fused=True):
        run = torch.compile(CASES[name], backend="ort_train", dynamic=False)
        run(x, indices)
        indices[6, 0] = wrong
        with pytest.raises(Exception, match="the host function gave error 1"):
            run(x, indices)
    assert "IndexError: a fused kernel found an index that is out of range" in capfd.readouterr().err
    with pytest.raises((IndexError, RuntimeError)):
        CASES[name](x, indices)
