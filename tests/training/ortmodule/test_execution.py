"""Section 1.3 of ORTModule's reference: how forward and backward may follow each other."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_program
from small_models import Dense, Normed, assert_steps_like_eager, compiles, pair
from torch import Tensor, nn

import ort_dynamo
from ort_dynamo import ORTModule
from ort_dynamo.embedding import compile_recorded
from ort_dynamo.testing import assert_close
from ort_dynamo.training.ortmodule import execution


def gradients(model: nn.Module) -> dict[str, Any]:
    return {name: p.grad for name, p in model.named_parameters()}


def assert_same_gradients(ort_model: nn.Module, model: nn.Module) -> None:
    for name, expected in gradients(model).items():
        assert_close(gradients(ort_model)[name], expected, name, strides=False)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_forwards_before_their_backwards(order: tuple[int, int]) -> None:
    ort_model, model = pair(Dense())
    x = torch.randn(2, 3, 8)
    for one in (ort_model, model):
        losses = [one(x[0]).sum(), (one(x[1]) ** 2).sum()]
        for index in order:
            losses[index].backward()
    assert_same_gradients(ort_model, model)


def test_gradients_accumulate_and_an_optimizer_steps() -> None:
    ort_model, model = pair(Normed())
    optimizers = [torch.optim.SGD(one.parameters(), lr=1e-2, momentum=0.9) for one in (ort_model, model)]
    for step in range(6):
        x = torch.randn(4 + step % 2, 8)
        for one, optimizer in zip((ort_model, model), optimizers, strict=True):
            torch.manual_seed(step)
            one(x)["out"].square().mean().backward()
            if step % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
    for name, parameter in model.named_parameters():
        assert_close(ort_model.get_parameter(name).detach(), parameter.detach(), name)


def test_no_grad_gives_results_without_gradients() -> None:
    ort_model, model = pair(Dense())
    x = torch.randn(3, 8)
    with torch.no_grad():
        found = ort_model(x)
    assert not found.requires_grad
    assert ort_model(x).requires_grad
    torch.testing.assert_close(found, model(x).detach())
    with torch.inference_mode():
        assert ort_model(x).is_inference()


def test_train_and_eval_keep_their_graphs() -> None:
    ort_model, model = pair(Normed())
    for _ in range(2):
        for mode in (True, False):
            assert_steps_like_eager(ort_model.train(mode), model.train(mode), torch.randn(5, 8))
    before = compiles()
    for rows in (5, 5):
        for mode in (True, False):
            assert_steps_like_eager(ort_model.train(mode), model.train(mode), torch.randn(rows, 8))
    assert compiles() == before


def test_requires_grad_may_change() -> None:
    ort_model, model = pair(Dense())
    x = torch.randn(3, 8)
    for frozen in (False, True, False):
        for one in (ort_model, model):
            one.get_parameter("fc1.weight").requires_grad_(not frozen)
        assert_steps_like_eager(ort_model, model, x)
    assert_steps_like_eager(ort_model, model, x.clone().requires_grad_())
    leaf = x.clone().requires_grad_()
    ort_model(leaf).sum().backward()
    other = x.clone().requires_grad_()
    model(other).sum().backward()
    torch.testing.assert_close(leaf.grad, other.grad)


def test_modules_share_parameters_and_follow_each_other() -> None:
    class Head(nn.Module):
        def __init__(self, body: nn.Module) -> None:
            super().__init__()
            self.body = body
            self.out = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.body(x))

    body = Dense()
    plain = [Head(body), Head(body)]
    copies = copy.deepcopy(plain)
    wrapped = [ORTModule(one) for one in copies]
    x = torch.randn(3, 8)
    for heads in (plain, wrapped):
        (heads[0](x).sum() + heads[1](x).square().sum()).backward()
    for one, other in zip(wrapped, plain, strict=True):
        assert_same_gradients(one, other)
    first, second = ORTModule(copy.deepcopy(body)), ORTModule(nn.Linear(4, 3))
    torch.testing.assert_close(second(first(x)), second.module(body(x)))


def test_a_result_that_is_written_to_is_found_out() -> None:
    class Squared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x).sigmoid()

    out = ORTModule(Squared())(torch.randn(3, 8))
    out.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_second_backward_is_refused_unless_the_graph_is_retained() -> None:
    ort_model, model = pair(Dense())
    x = torch.randn(3, 8)
    loss = ort_model(x).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()
    ort_model.zero_grad()
    for one in (ort_model, model):
        loss = one(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same_gradients(ort_model, model)


def test_dropout_has_eagers_mask_and_another_in_each_step() -> None:
    ort_model, model = pair(nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5)))
    x = torch.randn(3, 8)
    torch.manual_seed(3)
    found = [ort_model(x), ort_model(x)]
    torch.manual_seed(3)
    expected = [model(x), model(x)]
    torch.testing.assert_close(found, expected)
    assert not torch.equal(found[0], found[1])
    ort_model.eval()
    torch.testing.assert_close(ort_model(x), ort_model(x))


def test_determinism_follows_torch() -> None:
    ort_model, model = pair(Dense())
    x = torch.randn(3, 8)
    before = torch.are_deterministic_algorithms_enabled()
    try:
        for enabled in (True, False):
            torch.use_deterministic_algorithms(enabled)
            assert_steps_like_eager(ort_model, model, x)
    finally:
        torch.use_deterministic_algorithms(before)


def test_autocast_outside_is_autocast_inside() -> None:
    ort_model, model = pair(Dense())
    x = torch.randn(3, 8)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = ort_model(x), model(x)
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.factor * 10, None


def test_an_autograd_function_of_the_programs_is_traced() -> None:
    class WithFunction(Dense):
        def forward(self, input1: Tensor) -> Tensor:
            return Doubled.apply(super().forward(input1), 2.0)  # type: ignore[no-untyped-call,no-any-return]

    ort_model, model = pair(WithFunction())
    assert_steps_like_eager(ort_model, model, torch.randn(3, 8))


@pytest.mark.parametrize(
    "around",
    [ORTModule, lambda outer: torch.compile(outer, backend="ort_train", fullgraph=True)],
    ids=["ORTModule", "torch.compile"],
)
@pytest.mark.parametrize("has_run", [False, True], ids=["new", "has run"])
def test_an_ortmodule_is_a_part_of_the_graph_around_it(around: Callable[[nn.Module], nn.Module], has_run: bool) -> None:
    inner, model = pair(Dense())
    x = torch.randn(3, 8)
    if has_run:
        assert_steps_like_eager(inner, model, x)
    outer, before = around(nn.Sequential(nn.Tanh(), inner)), compiles()
    outputs, expected = outer(x), model(torch.tanh(x))
    outputs.sum().backward()
    expected.sum().backward()
    assert compiles() == before + 1
    assert_close(outputs, expected, "output")
    assert_same_gradients(inner, model)


def test_a_graph_break_runs_in_pieces_and_is_said(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Dense):
        def forward(self, input1: Tensor) -> Tensor:
            hidden = self.fc1(input1)
            if hidden.sum().item() > 1e9:
                hidden = hidden + 1
            return self.fc2(hidden)

    ort_model, model = pair(Broken())
    before = compiles()
    assert_steps_like_eager(ort_model, model, torch.randn(3, 8))
    assert compiles() >= before + 2
    (said,) = (text for record in caplog.records if "Broken runs in pieces" in (text := record.getMessage()))
    assert "Broken.forward (" in said


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_run_in_onnx_runtime(kind: type[nn.Module]) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = kind(8, 6, batch_first=True)
            self.out = nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.layer(x)[0])

    ort_model, model = pair(Recurrent())
    assert_steps_like_eager(ort_model, model, torch.randn(2, 5, 8))
    seen = ort_dynamo.summary()
    assert seen.native.total() > 0
    assert not [note for note in seen.skipped if "LSTM" in str(note) or "RNN" in str(note)]


def test_lazy_modules_are_initialized_by_the_first_call() -> None:
    layers = (
        nn.Sequential(nn.LazyLinear(6), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(2)) for _ in range(2)
    )  # torch copies no buffer that is not initialized
    ort_model, model = ORTModule(next(layers)), next(layers)
    x = torch.randn(5, 8)
    for one in (ort_model, model):
        torch.manual_seed(0)  # of the initial weights
        one(x)
    assert_steps_like_eager(ort_model, model, x)


class Classifier(nn.Module):
    """Chooses its loss in the first call, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.kind = nn.Linear(8, 4), None

    def forward(self, x: Tensor, scale: int = 1) -> Tensor:
        if self.kind is None:
            self.kind = "squares"
        return self.fc(x).square().sum() * scale


def test_a_module_that_changes_in_its_first_call_is_compiled_again_for_its_sizes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled: list[tuple[int, Any]] = []

    def noted(gm: Any, inputs: Any, options: Any) -> Any:
        compiled.append((len(compiled), [isinstance(one, torch.SymInt) for one in inputs].count(True)))
        return compile_recorded(gm, inputs, options)

    monkeypatch.setattr(execution, "compile_recorded", noted)
    ort_model, model = pair(Classifier())
    for rows, length in ((3, 4), (3, 4), (3, 4), (5, 4), (6, 4), (3, 4), (6, 5), (7, 6)):
        torch.testing.assert_close(ort_model(x := torch.ones(rows, length, 8)), model(x))
    assert compiled == [(0, 0), (1, 0), (2, 1), (3, 2)]  # sizes that have changed are symbols, others are not


def test_numbers_that_change_are_compiled_once() -> None:
    ort_model, model = pair(Classifier())
    before = compiles()
    for scale in range(2, 9):
        torch.testing.assert_close(ort_model(x := torch.ones(3, 8), scale), model(x, scale))
    assert compiles() - before == 2


def test_a_checkpointed_module_equals_eager() -> None:
    class Checkpointed(Dense):
        def forward(self, input1: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(super().forward, input1, use_reentrant=False)  # type: ignore[no-any-return]

    ort_model, model = pair(Checkpointed())
    assert_steps_like_eager(ort_model, model, torch.randn(3, 8))


def test_threads_may_call_one_module() -> None:
    ort_model = ORTModule(Dense()).eval()
    x = torch.randn(6, 8)
    expected = ort_model.module(x)
    errors: list[BaseException] = []

    def call() -> None:
        try:
            for _ in range(5):
                torch.testing.assert_close(ort_model(x), expected)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


DISTRIBUTED = """
import torch
from torch import nn
from ort_dynamo import ORTModule
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
import copy
plain = copy.deepcopy(model)
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
ddp = nn.parallel.DistributedDataParallel(ORTModule(model))
assert list(ddp.state_dict()) == ["module." + name for name in plain.state_dict()]
for rows in (3, 4, 5):
    x = torch.randn(rows, 8)
    ddp(x).sum().backward()
    plain(x).sum().backward()
for mine, theirs in zip(ddp.parameters(), plain.parameters()):
    torch.testing.assert_close(mine.grad, theirs.grad)
torch.distributed.destroy_process_group()
print("trained")
"""


def test_distributed_data_parallel_goes_around_it(tmp_path: Path) -> None:
    run = run_program(DISTRIBUTED, cwd=tmp_path)
    assert run.stdout.strip().endswith("trained"), run.stderr


@pytest.mark.slow
def test_memory_stays_over_steps_and_over_wraps() -> None:
    program = """
import gc, logging, torch
logging.disable(logging.CRITICAL)
from torch import nn
from ort_dynamo import ORTModule
def resident():
    gc.collect()
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(32, 64), nn.Linear(64, 8)
    def forward(self, x):
        return self.b(torch.relu(self.a(x)))
def steps(model, count):
    for step in range(count):
        model(torch.randn(16 + step % 7, 32)).sum().backward()
        model.zero_grad()
model = ORTModule(Net())
steps(model, 100)
first = resident()
steps(model, 1000)
second = resident()
for _ in range(100):
    steps(ORTModule(Net()), 3)
print(second - first, resident() - second)
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    over_steps, over_wraps = map(float, run.stdout.split())
    assert over_steps < 4
    assert over_wraps < 4
