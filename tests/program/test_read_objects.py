"""Modules, optimizers, tensors and objects that a function reads, wherever it has them from."""

from __future__ import annotations

import functools
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ort_dynamo.program.program_state import unchanged
from ort_dynamo.program.read_objects import MOST_ITEMS, global_names, modules_among, read_by

NET = nn.Linear(2, 1)
COUNTS: list[int] = []


def predict(x: torch.Tensor) -> torch.Tensor:
    return NET(x)


def by_a_helper(x: torch.Tensor) -> torch.Tensor:
    return predict(x).sum()


def by_a_lambda(x: torch.Tensor) -> torch.Tensor:
    return (lambda: NET(x))()


def with_a_default(x: torch.Tensor, net: nn.Module = NET) -> torch.Tensor:
    return net(x)


class Trainer:
    """Holds its networks in containers, and counts."""

    def __init__(self) -> None:
        self.nets = {"generator": NET}
        self.optimizers = [torch.optim.SGD(NET.parameters(), lr=0.1, momentum=0.9)]
        self.steps, self.losses = 0, [0.5]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.step(x)

    @property
    def net(self) -> nn.Module:
        return self.nets["generator"]

    def step(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.net(x).sum()
        loss.backward()
        self.optimizers[0].step()
        self.steps += 1
        self.losses.append(loss.item())
        return loss


@functools.wraps(predict)
def decorated(x: torch.Tensor) -> torch.Tensor:
    return predict(x)


NAMES = SimpleNamespace(trainer=Trainer())

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "a helper": by_a_helper,
    "a lambda inside": by_a_lambda,
    "a default": with_a_default,
    "a bound argument": functools.partial(lambda net, x: net(x), NET),
    "a method": Trainer().step,
    "a callable object": Trainer(),
    "a compiled function": torch.compile(by_a_helper, backend="eager"),
    "a decorator": decorated,
    "a namespace": lambda x: NAMES.trainer.step(x),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_module_is_found(name: str) -> None:
    assert [one for one in modules_among(read_by(FUNCTIONS[name])).values() if one is NET] == [NET]


def test_a_module_has_the_name_by_which_it_is_read() -> None:
    assert list(modules_among(read_by(Trainer().step))) == ["nets['generator']"]
    assert list(modules_among(read_by(by_a_helper))) == ["NET"]


def test_a_module_inside_another_is_found_once() -> None:
    whole = nn.Sequential(NET)
    assert modules_among(read_by(lambda x: whole(x) + NET(x))) == {"whole": whole}


def test_two_modules_among_one_name_are_both_found() -> None:
    def other(x: torch.Tensor) -> torch.Tensor:
        net = second
        return net(x)

    first = second = nn.Linear(2, 1)

    def one(net: nn.Module) -> Callable[..., Any]:
        return lambda x: net(x) + other(x)

    assert set(map(id, modules_among(read_by(one(NET))).values())) == {id(NET), id(first)}


def test_steps_of_a_trainer_and_of_a_scheduler_are_put_back() -> None:
    trainer = Trainer()
    scheduler = torch.optim.lr_scheduler.StepLR(trainer.optimizers[0], 1)

    def step(x: torch.Tensor) -> None:
        trainer.step(x)
        scheduler.step()

    step(torch.ones(1, 2))
    before = NET.weight.detach().clone(), trainer.optimizers[0].state[NET.weight]["momentum_buffer"].clone()
    losses, lr = list(trainer.losses), scheduler.get_last_lr()
    with unchanged(read_by(step).values()):
        step(torch.ones(1, 2))
        assert trainer.steps == 2
    assert (trainer.steps, trainer.losses, scheduler.last_epoch, scheduler.get_last_lr()) == (1, losses, 1, lr)
    assert torch.equal(NET.weight, before[0])
    assert torch.equal(trainer.optimizers[0].state[NET.weight]["momentum_buffer"], before[1])


def test_data_of_a_program_is_not_looked_through() -> None:
    data = [torch.ones(1)] * (MOST_ITEMS + 1)
    trainer = SimpleNamespace(data=data)

    def step() -> int:
        return len(data) + len(trainer.data)

    assert not [one for one in read_by(step).values() if isinstance(one, torch.Tensor)]


def test_attributes_are_no_globals() -> None:
    assert set(global_names((lambda x: x.COUNTS.append(len(NET.weight))).__code__)) == {"len", "NET"}


def test_a_pending_backward_may_run_after_a_step_that_was_undone() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    loss = model(torch.randn(4, 2)).sum()
    with unchanged([model]):
        model(torch.randn(4, 2)).sum().backward()
    loss.backward()
    assert model[0].weight.grad is not None


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self) -> None:
        self.numbers = torch.ones(8)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.numbers[index]


def test_data_sets_are_left_out() -> None:
    trainer = SimpleNamespace(data=Numbers())
    assert not [one for one in read_by(lambda: trainer.data[0]).values() if isinstance(one, (Numbers, torch.Tensor))]


def test_an_object_without_changes_is_never_without_its_attributes() -> None:
    class Watched(dict[str, Any]):
        """Counts how often it is emptied."""

        cleared = 0

        def clear(self) -> None:
            type(self).cleared += 1
            super().clear()

    class Owner:
        pass

    owner = Owner()
    owner.__dict__ = Watched(name="a", items=[1])
    with unchanged([owner]):
        pass
    assert Watched.cleared == 0


class AttributeDict(dict[str, Any]):
    """A dict whose items are its attributes."""

    __getattr__ = dict.__getitem__

    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.__dict__ = self


class Meter:
    def __init__(self) -> None:
        self.seen = 0


class Metered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 1)
        self.meter = Meter()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.meter.seen += 1
        return self.inner(x)


def test_containers_of_all_kinds_are_put_back() -> None:
    counts, ordered, log = Counter(a=1), OrderedDict(b=1, a=2), deque([1], maxlen=3)
    state = AttributeDict(steps=1)
    held = SimpleNamespace(pair=([1], {2}), state=state)

    def step() -> None:
        counts["a"] += 1
        ordered["c"] = 3
        ordered.move_to_end("b")
        log.append(2)
        state.steps += 1
        state["new"] = 1
        held.pair[0].append(2)
        held.pair[1].add(3)

    with unchanged(read_by(step).values()):
        step()
        assert (counts["a"], state["steps"]) == (2, 2)
    assert (counts, list(ordered.items()), list(log)) == ({"a": 1}, [("b", 1), ("a", 2)], [1])
    assert (dict(state), held.pair) == ({"steps": 1}, ([1], {2}))


def test_objects_of_modules_and_of_arguments_are_put_back() -> None:
    model, trainer = Metered(), Trainer()
    weight = NET.weight.detach().clone()

    def step(trainer: Trainer, x: torch.Tensor) -> None:
        model(x)
        trainer.step(x)

    with unchanged(read_by(step, trainer, torch.ones(1, 2)).values()):
        step(trainer, torch.ones(1, 2))
    assert (model.meter.seen, trainer.steps) == (0, 0)
    assert torch.equal(NET.weight, weight)
    assert list(read_by(model)) == ["", "meter (Meter)"]
    with unchanged(read_by(model).values()):
        model(torch.ones(1, 2))
    assert model.meter.seen == 0


class Proxy:
    """Looks for its object at each question, and has none."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(f"no object: {name}")


class Key:
    def __repr__(self) -> str:
        raise ValueError("no text")


def test_objects_that_have_nothing_to_do_with_the_step_do_not_stop_it() -> None:
    deep: list[Any] = []
    for _ in range(3000):
        deep = [deep]
    gone = weakref.proxy(Meter())
    given = SimpleNamespace(proxy=Proxy(), keys={Key(): 1}, deep=deep, gone=gone, read=AttributeDict(a=1))

    def step(x: torch.Tensor) -> torch.Tensor:
        return NET(x) + len(given.keys)

    with unchanged(read_by(step).values()):
        step(torch.ones(1, 2))
    assert list(modules_among(read_by(step)).values()) == [NET]


def test_all_is_put_back_where_one_thing_cannot_be() -> None:
    model = nn.Linear(2, 1)
    before = model.weight.detach().clone()
    rows = torch.zeros(1).expand(3)  # which cannot be written to

    def step() -> None:
        with torch.no_grad():
            model.weight.add_(1)
        rows.data.untyped_storage().copy_(torch.ones(1).untyped_storage())

    with pytest.raises(RuntimeError, match="more than one element"), unchanged([model, rows]):
        step()
    assert torch.equal(model.weight, before)


def test_memory_that_is_given_back_is_left_alone() -> None:
    one = torch.ones(4)
    one.untyped_storage().resize_(0)
    with unchanged([one]):
        one.untyped_storage().resize_(16)
        one.fill_(2)
    assert one.tolist() == [2.0] * 4


def test_shared_containers_are_copied_once() -> None:
    shared = {index: torch.ones(1) for index in range(900)}
    objects = [Meter() for _ in range(200)]
    for one in objects:
        one.shared = shared  # type: ignore[attr-defined]
    with unchanged(objects) as state:
        assert len(state._values) == 900
        assert len(state._contents) == 201
