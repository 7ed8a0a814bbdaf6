"""Tests of passing tensors to a session: the private and the public way give the same."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from ort_dynamo.cache.open_island import CACHE
from ort_dynamo.errors import ExecutionError
from ort_dynamo.runtime import binding as module
from ort_dynamo.runtime.binding import crossing
from ort_dynamo.runtime.installed.capabilities import installed_runtime
from ort_dynamo.runtime.installed.importing import binding


def with_push(*signatures: str) -> SimpleNamespace:
    """A build whose OrtValueVector.push_back has these signatures, and whose other names are the installed one's."""
    push = SimpleNamespace(__doc__="\n".join(signatures))
    private = binding()
    vector = SimpleNamespace(push_back=push, dlpack_at=private.OrtValueVector.dlpack_at, reserve=None)
    return SimpleNamespace(
        OrtValueVector=vector, InferenceSession=private.InferenceSession, OrtDevice=private.OrtDevice
    )


@pytest.fixture
def asked_anew() -> Iterator[None]:
    for forget in (
        crossing.cache_clear,
        torch._dynamo.reset,
        CACHE.clear,
    ):  # sessions keep their crossing
        forget()
    yield
    for forget in (crossing.cache_clear, torch._dynamo.reset, CACHE.clear):
        forget()


@pytest.fixture
def public(asked_anew: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "binding", SimpleNamespace)  # a build with no private name at all


def test_the_installed_build_has_the_private_crossing() -> None:
    assert crossing().vector is binding().OrtValueVector


@pytest.mark.usefixtures("asked_anew")
@pytest.mark.parametrize(
    ("signature", "private", "bytes_"),
    [
        ("push_back(self: V, dlpack_tensor: object, is_bool_tensor: bool = False) -> None", True, True),
        ("push_back(self: V, dlpack_tensor: object) -> None", True, False),
        ("push_back(self: V, dlpack_tensor: object, device: OrtDevice) -> None", False, False),
        ("push_back(self: V, arg0: OrtValue) -> None", False, False),
        ("", False, False),
    ],
)
def test_the_signature_decides(monkeypatch: pytest.MonkeyPatch, signature: str, private: bool, bytes_: bool) -> None:
    build = with_push("push_back(self: V, arg0: OrtValue) -> None", signature)
    monkeypatch.setattr(module, "binding", lambda: build)
    assert (crossing().vector is build.OrtValueVector) == private
    assert crossing().bool_is_bytes == bytes_


@pytest.mark.usefixtures("public")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool], ids=str)
@pytest.mark.parametrize("shape", [(3, 4), (0, 4), ()], ids=str)
def test_the_public_crossing_takes_and_gives(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = (torch.randn(shape) * 3).to(dtype)

    @torch.compile(backend="ort_train", options={"fallback": "error"})
    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.cat((x.flatten(), x.flatten())), x == x.flip(())

    got, equal = f(x)
    assert got.dtype is dtype
    assert torch.equal(got, torch.cat((x.flatten(), x.flatten())))
    assert equal.dtype is torch.bool
    assert equal.shape == shape
    assert equal.all()


@pytest.mark.usefixtures("public")
def test_the_public_crossing_takes_bfloat16_where_it_can() -> None:
    x = torch.randn(3, 4, dtype=torch.bfloat16)
    f = torch.compile(lambda x: x * 2, backend="ort_train", options={"fallback": "error"})
    if installed_runtime().has_gradient_kernels:  # 1.19.2 knows dtypes by numpy's names only
        with pytest.raises(ExecutionError, match=r"takes no torch\.bfloat16"):
            f(x)
    else:
        assert torch.equal(f(x), x * 2)


@pytest.mark.usefixtures("public")
def test_a_model_trains_over_the_public_crossing() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Dropout(0.5), torch.nn.Linear(8, 3))
    x, y = torch.randn(6, 4), torch.randint(3, (6,))
    losses = []
    for step in (model, torch.compile(model, backend="ort_train")):
        torch.manual_seed(1)
        loss = torch.nn.functional.cross_entropy(step(x), y)
        loss.backward()
        losses.append((loss.item(), [p.grad.clone() for p in model.parameters()]))
        model.zero_grad()
    (eager, eager_grads), (ours, our_grads) = losses
    assert ours == pytest.approx(eager, rel=1e-6)
    for a, b in zip(our_grads, eager_grads, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.usefixtures("public")
def test_numbers_and_symbolic_sizes_cross_publicly() -> None:
    f = torch.compile(lambda x, n: x[: x.shape[0] // 2] * n, backend="ort_train", dynamic=True)
    for rows in (4, 6, 0):
        x = torch.randn(rows, 3)
        torch.testing.assert_close(f(x, 3), x[: rows // 2] * 3)
