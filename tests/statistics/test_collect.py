"""A block of collect_statistics sees each value, and its runs have the results of those outside."""

from __future__ import annotations

import copy
import inspect
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ort_dynamo
from ort_dynamo import RunStatistics, collect_statistics
from ort_dynamo.compilation import compiler
from ort_dynamo.runtime import compiled_graph
from ort_dynamo.runtime.boxed import boxed
from ort_dynamo.runtime.observe import observed_run


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.5), nn.Linear(16, 4))


def images() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))


class Spectrum(nn.Module):
    """Has an operator that runs in eager."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.rfft(self.layer(x)).abs().exp()


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (4, 8)),
    "images": (images, (2, 3, 8, 8)),
    "fallback": (Spectrum, (3, 8)),
}


def operators(run: RunStatistics, role: str, step: int = 0) -> list[str]:
    found = [one for one in run.statistics if one.role == role and one.step == step]
    return [one.overload.split(".")[1] for one in found if one.overload != "input"]


def trained(model: nn.Module, step: Callable[[Tensor], Tensor], sizes: tuple[int, ...], watch: bool) -> list[Tensor]:
    """Train two steps, and give the losses, gradients, buffers and the state of the random numbers."""
    torch.manual_seed(1)
    found = []
    for _ in range(2):
        if watch:
            with collect_statistics() as run:
                loss = step(torch.randn(sizes)).square().sum()
                loss.backward()
            assert run.statistics
        else:
            loss = step(torch.randn(sizes)).square().sum()
            loss.backward()
        found.append(loss.detach())
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [*found, *gradients, *model.buffers(), torch.get_rng_state()]


@pytest.mark.parametrize("name", CASES)
def test_a_run_that_is_watched_computes_the_same(name: str) -> None:
    made, sizes = CASES[name]
    model = made()
    other = copy.deepcopy(model)
    expected = trained(model, torch.compile(model, backend="ort_train"), sizes, watch=False)
    found = trained(other, torch.compile(other, backend="ort_train"), sizes, watch=True)
    assert len(found) == len(expected) >= 5
    for one, same in zip(found, expected, strict=True):
        assert torch.equal(one, same)


def test_each_operator_of_a_training_step_is_seen_inside_its_island() -> None:
    model = mlp()
    compiled = torch.compile(model, backend="ort_train")
    x = torch.randn(4, 8)
    with collect_statistics() as run:
        compiled(x).sum().backward()
    assert operators(run, "forward") == ["bernoulli", "addmm", "gelu", "_to_copy", "div", "mul", "addmm"]
    assert {"mm", "gelu_backward", "sum", "mul"} <= {*operators(run, "backward")}
    first = next(one for one in run.statistics if one.overload == "aten.addmm.default")
    with torch.no_grad():
        value = model[0](x).double()
    assert (first.module, first.dtype, first.shape) == ("0 (Linear)", "float32", (4, 16))
    assert (first.step, first.graph, first.nan, first.inf) == (0, 0, 0, 0)
    numbers = (first.min, first.max, first.mean, first.std)
    expected = (value.min(), value.max(), value.mean(), value.std(correction=0))
    assert numbers == pytest.approx([*map(float, expected)], rel=1e-5)


def test_the_graph_of_a_convolution_that_torch_runs_is_seen() -> None:
    compiled = torch.compile(images(), backend="ort_train")
    with collect_statistics() as run:
        compiled(torch.randn(2, 3, 8, 8)).sum().backward()
    assert {"convolution", "native_batch_norm", "relu"} <= {
        name.replace("_native_batch_norm_legit_functional", "native_batch_norm") for name in operators(run, "forward")
    }
    assert {"convolution_backward", "threshold_backward"} <= {*operators(run, "backward")}


def test_a_fallback_operator_and_complex_values_are_seen() -> None:
    compiled = torch.compile(Spectrum(), backend="ort_train")
    with collect_statistics() as run:
        compiled(torch.randn(3, 8)).sum().backward()
    assert operators(run, "forward") == ["addmm", "_fft_r2c", "abs", "exp"]
    spectrum = next(one for one in run.statistics if one.overload == "aten._fft_r2c.default")
    magnitude = next(one for one in run.statistics if one.overload == "aten.abs.default")
    assert (spectrum.dtype, spectrum.shape) == ("complex64", (3, 5))
    assert spectrum.max == pytest.approx(magnitude.max)
    assert "torch.fft.rfft(self.layer(x))" in spectrum.line


def test_values_of_inference_are_seen() -> None:
    compiled = torch.compile(mlp().eval(), backend="ort_train")
    with torch.no_grad(), collect_statistics() as run:
        compiled(torch.randn(4, 8))
    assert operators(run, "inference") == ["addmm", "gelu", "addmm"]


# -- off -------------------------------------------------------------------------------------------------------------


def test_nothing_is_added_to_code_and_sessions_where_nobody_collects(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Callable[..., Any]] = []
    opened: list[str] = []
    written: list[str] = []
    open_session, outer_code = compiled_graph.open_session, observed_run.outer_code

    def kept(*args: Any, **kwargs: Any) -> Any:
        made.append(boxed(*args, **kwargs))
        return made[-1]

    def counted(built: Any, *args: Any, **kwargs: Any) -> Any:
        opened.append(built.name)
        return open_session(built, *args, **kwargs)

    def wrote(*args: Any) -> Any:
        written.append("observed")
        return outer_code(*args)

    monkeypatch.setattr(compiler, "boxed", kept)
    monkeypatch.setattr(compiled_graph, "open_session", counted)
    monkeypatch.setattr(observed_run, "outer_code", wrote)
    model, x = mlp(), torch.randn(4, 8)
    torch.compile(model, backend="ort_train")(x).sum().backward()
    assert (len(made), len(opened), len(written)) == (2, 2, 0)  # a session each for forward and backward
    torch.compiler.reset()
    with collect_statistics():
        compiled = torch.compile(model, backend="ort_train")
        compiled(x).sum().backward()
    assert Counter(name.endswith("-shown") for name in opened) == {False: 4, True: 2}
    assert [inspect.getsource(one) for one in made[:2]] == [inspect.getsource(one) for one in made[2:]]
    assert "show(" not in inspect.getsource(made[0])
    assert not observed_run._sessions  # closed with the block
    compiled(x).sum().backward()
    assert (len(made), len(opened), len(written)) == (4, 6, 2)


def test_a_model_that_was_compiled_before_the_block_is_seen() -> None:
    compiled = torch.compile(mlp(), backend="ort_train")
    compiled(torch.randn(4, 8)).sum().backward()
    with collect_statistics() as run:
        compiled(torch.randn(4, 8)).sum().backward()
    count = len(run.statistics)
    compiled(torch.randn(4, 8)).sum().backward()
    assert {one.role for one in run.statistics} == {"forward", "backward"}
    assert len(run.statistics) == count  # the third call is behind the block


def test_a_block_in_another_sees_its_part() -> None:
    compiled = torch.compile(mlp().eval(), backend="ort_train")
    with torch.no_grad(), collect_statistics() as outside:
        compiled(torch.randn(4, 8))
        with collect_statistics() as inside:
            compiled(torch.randn(4, 8))
    assert {one.step for one in outside.statistics} == {0, 1}
    assert {one.step for one in inside.statistics} == {0}
    assert len(outside.statistics) == 2 * len(inside.statistics)


def test_a_compile_in_mode_debug_still_checks_its_first_unwatched_call(monkeypatch: pytest.MonkeyPatch) -> None:
    from ort_dynamo.runtime.observe import checked_run

    checked: list[str] = []
    monkeypatch.setattr(checked_run, "_compare", lambda node, result: checked.append(node.name))
    compiled = torch.compile(Spectrum(), backend="ort_train", mode="debug")
    with collect_statistics() as run:
        compiled(torch.randn(3, 8))
    assert run.statistics
    assert not checked
    for _ in range(2):
        compiled(torch.randn(3, 8))
    assert checked
    assert len(checked) == len({*checked})


def test_a_call_that_torch_transforms_computes_the_same_and_is_not_seen() -> None:
    compiled = torch.compile(lambda x: x.sin() * 2, backend="ort_train")
    x = torch.randn(3)
    compiled(x)
    with collect_statistics() as run:
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, torch.ones(3))
            value, tangent = torch.autograd.forward_ad.unpack_dual(compiled(dual))
        assert tangent is not None
        torch.testing.assert_close(tangent, x.cos() * 2)
        torch.testing.assert_close(value, x.sin() * 2)
    assert not run.statistics


# -- steps, graphs, filters ------------------------------------------------------------------------------------------


def test_a_step_begins_with_the_next_forward() -> None:
    compiled = torch.compile(mlp(), backend="ort_train")
    with collect_statistics() as run:
        for _ in range(3):
            compiled(torch.randn(4, 8)).sum().backward()
    seen = dict.fromkeys((one.step, one.role) for one in run.statistics)
    assert [*seen] == [(step, role) for step in range(3) for role in ("forward", "backward")]


def test_every_second_step_is_seen() -> None:
    compiled = torch.compile(mlp(), backend="ort_train")
    with collect_statistics(every=2) as run:
        for _ in range(5):
            compiled(torch.randn(4, 8)).sum().backward()
    assert sorted({one.step for one in run.statistics}) == [0, 2, 4]


def test_a_program_may_count_its_steps_itself() -> None:
    compiled = torch.compile(mlp(), backend="ort_train")
    with collect_statistics() as run:
        for _ in range(2):
            run.next_step()
            for _ in range(2):  # gradients are accumulated
                compiled(torch.randn(4, 8)).sum().backward()
    assert {one.step for one in run.statistics} == {1, 2}
    assert Counter(one.step for one in run.statistics if one.overload == "aten.gelu.default") == {1: 2, 2: 2}


def test_two_graphs_of_a_graph_break_are_told_apart() -> None:
    def broken(x: Tensor) -> Tensor:
        x = x.exp()
        torch._dynamo.graph_break()
        return x.sin()

    compiled = torch.compile(broken, backend="ort_train")
    x = torch.randn(3, requires_grad=True)
    with collect_statistics() as run:
        for _ in range(2):
            compiled(x).sum().backward()
    seen = dict.fromkeys((one.step, one.graph, one.role) for one in run.statistics)
    once = [(0, "forward"), (1, "forward"), (1, "backward"), (0, "backward")]
    assert [*seen] == [(step, graph, role) for step in range(2) for graph, role in once]
    assert operators(run, "forward") == ["exp", "sin"]


def test_a_dynamic_batch_is_seen_in_each_size() -> None:
    compiled = torch.compile(mlp(), backend="ort_train", dynamic=True)
    with collect_statistics() as run:
        for batch in (3, 5, 1, 7):
            compiled(torch.randn(batch, 8)).sum().backward()
    first = [one.shape for one in run.statistics if one.overload == "aten.gelu.default"]
    assert first == [(3, 16), (5, 16), (1, 16), (7, 16)]
    assert [one.step for one in run.statistics if one.overload == "aten.gelu.default"] == [0, 1, 2, 3]


class Layers(nn.Module):
    """Has layers that are compiled one by one, by one code."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.checkpointed = checkpointed
        for layer in self.layers:
            layer.compile(backend="ort_train")

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return x


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).exp().sin()


@pytest.mark.parametrize("checkpointed", [False, True])
def test_layers_that_share_a_graph_or_run_again_in_the_backward_are_one_step(checkpointed: bool) -> None:
    model = Layers(checkpointed)
    with collect_statistics() as run:
        for _ in range(2):
            model(torch.randn(2, 4)).sum().backward()
    forwards = 2 * 3 if checkpointed else 3
    assert Counter(one.step for one in run.statistics if one.overload == "aten.exp.default") == dict.fromkeys(
        range(2), forwards
    )


def test_graphs_of_another_thread_begin_no_step() -> None:
    compiled, other = torch.compile(mlp(), backend="ort_train"), torch.compile(Layer(), backend="ort_train")

    def trained() -> None:
        for _ in range(3):
            other(torch.randn(2, 4)).sum().backward()

    with collect_statistics() as run:
        for _ in range(2):
            first = compiled(torch.randn(4, 8)).sum()
            thread = threading.Thread(target=trained)
            thread.start()
            thread.join()
            (first + compiled(torch.randn(4, 8)).sum()).backward()
    seen = Counter(one.step for one in run.statistics if one.overload == "aten.gelu.default")
    assert seen == {0: 2, 1: 2}
    assert Counter(one.step for one in run.statistics if one.overload == "aten.exp.default") == {0: 3, 1: 3}


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([mlp(), mlp().append(nn.Linear(4, 8))])
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers[1](F.pad(self.layers[0](x), (0, 4))))


@pytest.mark.parametrize(
    ("modules", "paths"),
    [
        ("layers.1", {"layers.1.0", "layers.1.1", "layers.1.2", "layers.1.3", "layers.1.4"}),
        (["layers.?.0", "head"], {"layers.0.0", "layers.1.0", "head"}),
        ("*.3", {"layers.0.3", "layers.1.3"}),
        ("", {""}),
        ("absent", set()),
    ],
)
def test_modules_are_chosen_by_their_paths(modules: str | list[str], paths: set[str]) -> None:
    compiled = torch.compile(Nested(), backend="ort_train")
    with collect_statistics(modules=modules) as run:
        compiled(torch.randn(4, 8)).sum().backward()
    assert {one.module.rpartition("(")[0].strip() for one in run.statistics} == paths
    assert all(one.overload != "input" for one in run.statistics)


def test_a_finite_run_has_no_nan_and_prints_a_table() -> None:
    compiled = torch.compile(mlp(), backend="ort_train")
    with collect_statistics() as run:
        assert str(run) == "0 values, 0 graphs, 0 steps\nNo graph of ort_train ran."
        compiled(torch.randn(4, 8)).sum().backward()
    assert run.first_nan() is None
    text = str(run)
    assert f"{len(run.statistics)} values, 1 graphs, 1 steps" in text
    assert "aten.gelu_backward.default" in text
    assert "first NaN" not in text


def test_names_are_public() -> None:
    for name in ("collect_statistics", "compare_statistics", "load_statistics", "RunStatistics", "ValueStatistics"):
        assert name in ort_dynamo.__all__
        assert getattr(ort_dynamo, name)


def test_the_graphs_of_an_ortmodule_are_seen() -> None:
    model = ort_dynamo.ORTModule(mlp())
    with collect_statistics() as run:
        model(torch.randn(4, 8)).sum().backward()
    assert {"addmm", "gelu"} <= {*operators(run, "forward")}
    assert "gelu_backward" in operators(run, "backward")
