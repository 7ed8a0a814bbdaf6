"""Several models in several threads, one graph compiled by several threads, and a process that is spawned."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from children import ran
from torch import nn
from torch._dynamo.utils import counters


def model(width: int) -> nn.Module:
    torch.manual_seed(width)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2))


def trained(run: Callable[[torch.Tensor], torch.Tensor], weights: nn.Module, steps: int) -> list[torch.Tensor]:
    for _ in range(steps):
        run(torch.ones(3, 4)).square().sum().backward()
        with torch.no_grad():
            for parameter in weights.parameters():
                parameter -= 0.01 * parameter.grad
                parameter.grad = None
    return [parameter.detach() for parameter in weights.parameters()]


def in_threads(works: list[Callable[[], None]]) -> None:
    errors: list[BaseException] = []
    together = threading.Barrier(len(works))

    def guarded(work: Callable[[], None]) -> None:
        try:
            together.wait(60)
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]


@pytest.mark.parametrize("widths", [(3, 4, 5), (6, 6, 6)], ids=["different graphs", "one graph"])
def test_each_thread_trains_a_model_of_its_own(widths: tuple[int, ...]) -> None:
    def work(width: int) -> None:
        mine, theirs = pair[width].pop()
        torch.testing.assert_close(trained(torch.compile(mine, backend="ort_train"), mine, 20), theirs)

    pair: dict[int, list[tuple[nn.Module, list[torch.Tensor]]]] = {}
    for width in widths:
        eager = model(width)
        pair.setdefault(width, []).append((model(width), trained(eager, eager, 20)))
    torch._dynamo.lookup_backend("ort_train")  # torch's first look-up of a backend is not safe for threads
    in_threads([lambda w=width: work(w) for width in widths])  # type: ignore[misc]
    assert counters["ort_train"]["eager_nodes"] == 0


def test_several_models_run_in_each_of_several_threads() -> None:
    models = [model(width).requires_grad_(False) for width in (3, 4, 5)]
    compiled = [torch.compile(one, backend="ort_train") for one in models]
    inputs = [torch.full((2, 4), float(number), requires_grad=True) for number in range(3)]
    expected = [[torch.autograd.grad(one(x).sum(), x)[0] for one in models] for x in inputs]

    def work(number: int) -> None:
        for _ in range(20):
            for run, want in zip(compiled, expected[number], strict=True):
                torch.testing.assert_close(torch.autograd.grad(run(inputs[number]).sum(), inputs[number])[0], want)

    in_threads([lambda n=number: work(n) for number in range(3)])  # type: ignore[misc]


SPAWNING = """
import multiprocessing, sys
import torch


def loss(state):
    model = torch.nn.Linear(4, 2)
    model.load_state_dict(state)
    result = torch.compile(model, backend="ort_train")(torch.ones(3, 4)).sum()
    result.backward()
    return result.item(), model.weight.grad.sum().item()


def work(state, results):
    results.put(loss(state))


if __name__ == "__main__":
    state = torch.nn.Linear(4, 2).state_dict()
    mine = loss(state)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    child = context.Process(target=work, args=(state, results))
    child.start()
    assert results.get(timeout=200) == mine
    child.join(60)
    assert child.exitcode == 0, child.exitcode
    assert loss(state) == mine
    print("done")
"""


def test_a_spawned_process_compiles_for_itself(tmp_path: Path) -> None:
    program = tmp_path / "spawning.py"
    program.write_text(SPAWNING)
    run = f"import runpy, sys; sys.argv = [{str(program)!r}]; runpy.run_path({str(program)!r}, run_name='__main__')"
    out, _ = ran(run, ORT_DYNAMO_CACHE="1", ORT_DYNAMO_CACHE_DIR=str(tmp_path))
    assert out == "done\n"
