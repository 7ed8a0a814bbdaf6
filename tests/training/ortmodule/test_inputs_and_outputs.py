"""Section 1.2 of ORTModule's reference: every form of inputs and results."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from small_models import Dense, assert_steps_like_eager, compiles, pair
from torch import Tensor, nn

from ort_dynamo import ORTModule
from ort_dynamo.training.ortmodule import ORTModuleIOError


class Many(nn.Module):
    """Takes arguments of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, a: Tensor, /, b: Any = None, *args: Tensor, c: Any = 1, **kwargs: Tensor) -> Tensor:
        found = self.fc(a)
        for one in (b, *args, *kwargs.values()):
            if one is not None:
                found = found + one
        return found * c


def arguments() -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    def x() -> Tensor:
        return torch.randn(3, 8)

    positional = [(x(),), (x(), None), (x(), x()), (x(), x(), x(), x())]
    keywords = [{}, {"c": 2}, {"c": 0.5}, {"c": True}, {"d": x()}, {"e": x(), "d": x(), "c": 3}]
    return list(itertools.product(positional, keywords))


def test_arguments_may_be_given_in_every_way() -> None:
    ort_model, model = pair(Many())
    for args, kwargs in arguments():
        assert_steps_like_eager(ort_model, model, *args, **kwargs)
    x, y = torch.randn(3, 8), torch.randn(3, 8)
    torch.testing.assert_close(ort_model(x, b=y, c=2), ort_model(x, c=2, b=y))


@pytest.mark.parametrize("number", [0, 1, -3, 123456789, 2.5, -1e10, 1e10, True, False])
def test_numbers_are_arguments(number: Any) -> None:
    ort_model, model = pair(Many())
    for value in (number, number * 3 + 1):
        assert_steps_like_eager(ort_model, model, torch.randn(3, 8), c=value)


def test_numbers_that_change_compile_a_few_times_only() -> None:
    ort_model = ORTModule(Many())
    x = torch.randn(3, 8)
    for number in range(2, 5):
        ort_model(x, c=number)
    before = compiles()
    for number in range(5, 12):
        torch.testing.assert_close(ort_model(x, c=number), ort_model.module(x, c=number))
    assert compiles() == before


Pair = namedtuple("Pair", ["first", "second"])


class Nested(nn.Module):
    """Takes and gives nested containers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, batch: Any) -> Any:
        x, rest = batch["x"], batch["rest"]
        inner = rest[1][0] if rest[0] is None else rest[0]
        out = self.fc(x + inner)
        return {
            "out": out,
            "pair": Pair(out * 2, None),
            "list": [out + 1, (out, x), []],
            "ordered": OrderedDict(a=out.sum(), b=batch.get("name")),
            "number": 3,
            "mask": out > 0,
        }


def test_inputs_and_results_may_be_nested() -> None:
    ort_model, model = pair(Nested())
    for rest in ([None, (torch.randn(3, 8),)], [torch.randn(3, 8)], (torch.randn(3, 8), None)):
        batch = {"x": torch.randn(3, 8), "rest": rest, "name": "some text"}
        found, expected = ort_model(batch), model(batch)
        assert type(found["pair"]) is Pair
        assert type(found["ordered"]) is OrderedDict
        assert found["ordered"]["b"] == "some text"
        assert found["number"] == 3
        assert found["list"][1][1] is batch["x"]
        torch.testing.assert_close(found["list"][0], expected["list"][0])
        assert_steps_like_eager(ort_model, model, batch)


class Odd(nn.Module):
    """Returns None, an unchanged input, a result twice, and a result without a gradient, in between."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.unused = nn.Linear(8, 8)

    def forward(self, x: Tensor, flags: Tensor, small: Tensor, unused: Any = None) -> Any:
        out = self.fc(x)
        return None, out, flags, out, out.argmax(1), (out > 0).long(), small, ~flags, small + 1


def test_results_may_be_none_inputs_repeated_and_without_gradients() -> None:
    ort_model, model = pair(Odd())
    x, flags = torch.randn(3, 8), torch.tensor([True, False, True])
    for small in (torch.tensor([1, 2], dtype=torch.uint8), torch.tensor([1.5]), torch.tensor([], dtype=torch.int32)):
        found = ort_model(x, flags, small, unused=[None, {"a": "b"}])
        assert found[0] is None
        assert found[2] is flags
        assert not found[4].requires_grad
        assert_steps_like_eager(ort_model, model, x, flags, small)
    assert ort_model.unused.weight.grad is None


def test_inputs_that_are_not_contiguous_and_gradients_that_are_not() -> None:
    ort_model, model = pair(Dense())
    base = torch.randn(8, 6)
    found = []
    for one in (ort_model, model):
        x = base.clone().requires_grad_()
        out = one(x.t()[::2])
        out.backward(torch.ones(4, 3).t())
        found.append((out, x.grad))
    torch.testing.assert_close(found[0], found[1])


@dataclass
class Point:
    x: Tensor
    y: Tensor


class OfPoint(nn.Module):
    def forward(self, point: Point) -> Tensor:
        return point.x * point.y


class ToPoint(nn.Module):
    def forward(self, x: Tensor) -> Point:
        return Point(x + 1, x * 2)


@pytest.mark.parametrize("policy", ["FALLBACK_DISABLE", "FALLBACK_UNSUPPORTED_DEVICE"])
def test_other_types_are_refused_with_the_type(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", policy)
    x = torch.randn(3)
    with pytest.raises(ORTModuleIOError, match=r"ORTModule does not support input type .*Point'> for input point"):
        ORTModule(OfPoint())(Point(x, x))
    with pytest.raises(ORTModuleIOError, match=r"ORTModule does not support input type .*Point'> for input point"):
        ORTModule(OfPoint())(point=Point(x, x))
    with pytest.raises(ORTModuleIOError, match=r"ORTModule does not support input type .*Point'> for input batch_x_0"):
        ORTModule(Nested())({"x": [Point(x, x)], "rest": None})
    with pytest.raises(ORTModuleIOError, match=r"extract schema from data: Unsupported flatten data type: .*Point'>"):
        ORTModule(ToPoint())(x)


@pytest.mark.parametrize(
    ("forward", "name"),
    [(max, "0"), (functools.partial(torch.add, 1), "0"), (functools.partial(lambda x, y: y, 1), "y")],
)
def test_other_types_are_refused_by_functions_that_may_not_tell_their_parameters(
    forward: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_DISABLE")
    module = OfPoint()
    module.forward = forward
    with pytest.raises(ORTModuleIOError, match=rf"Point'> for input {name}"):
        ORTModule(module)(Point(torch.ones(1), torch.ones(1)))


def test_the_outputs_and_caches_of_transformers_pass() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 1, "n_embd": 8, "n_head": 1, "vocab_size": 16, "n_positions": 16}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    ort_model, model = pair(transformers.GPT2LMHeadModel(config).eval())
    tokens = torch.randint(16, (2, 6))
    found = ort_model(input_ids=tokens, labels=tokens, use_cache=True)
    expected = model(input_ids=tokens, labels=tokens, use_cache=True)
    assert type(found) is type(expected)
    torch.testing.assert_close(found.loss, expected.loss)
    renamed = "cache" in inspect.signature(model.forward).parameters  # since transformers 5.24
    keyword = "cache" if renamed else "past_key_values"
    again = ort_model(input_ids=tokens[:, :1], **{keyword: found.past_key_values})
    torch.testing.assert_close(
        again.logits, model(input_ids=tokens[:, :1], **{keyword: expected.past_key_values}).logits
    )


def test_any_batch_and_length_after_the_second_compiles_nothing() -> None:
    ort_model, model = pair(Dense())
    for rows in (4, 6):
        assert_steps_like_eager(ort_model, model, torch.randn(rows, 8))
    before = compiles()
    for rows in (2, 3, 4, 5, 6, 33):
        assert_steps_like_eager(ort_model, model, torch.randn(rows, 8))
    assert compiles() == before
    ort_model(torch.randn(2, 3, 8))  # another rank is another graph, of any size at once
    before = compiles()
    assert_steps_like_eager(ort_model, model, torch.randn(5, 7, 8))
    assert compiles() == before
