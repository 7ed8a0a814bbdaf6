"""Recomputation end to end: the same gradients, bit by bit, with fewer saved bytes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ort_dynamo import memory_plan
from ort_dynamo.testing import eager_reasons, patch_facts, saved_for_backward


class Layer(nn.Module):
    """A transformer layer with dropout on weights, attention's result and MLP."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        weights = F.dropout(torch.softmax(q @ k.transpose(-1, -2) / 4, -1), 0.2, self.training)
        x = x + F.dropout(self.out(weights @ v), 0.1, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), 0.1, self.training)


class Transformer(nn.Module):
    def __init__(self, layers: int = 3, checkpointed: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self._checkpointed = checkpointed

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.dropout(self.embedding(tokens), 0.1, self.training)
        for layer in self.layers:
            x = layer(x) if self._checkpointed is None else checkpoint(layer, x, **self._checkpointed)
        return x.square().mean()


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer1, self.layer2, self.layer3 = (self._stage() for _ in range(3))

    @staticmethod
    def _stage() -> nn.Module:
        convolution = nn.Conv2d(4, 4, 3, padding=1)
        return nn.Sequential(convolution, nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer3(self.layer2(self.layer1(x))).square().mean()


def step(make: Callable[[], nn.Module], x: Tensor, **options: Any) -> tuple[dict[str, Tensor], int]:
    """Two training steps from one seed: loss, gradients and buffers of the second, and the bytes it kept."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = make()
    compiled = torch.compile(model, backend="ort_train", options=options, fullgraph=True)
    for _ in range(2):
        model.zero_grad()
        with saved_for_backward(*model.parameters(), *model.buffers(), x) as kept:
            loss = compiled(x)
        loss.backward()
    assert not eager_reasons()
    gradients = {f"gradient of {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    buffers = {f"buffer {n}": b.clone() for n, b in model.named_buffers()}
    return {"loss": loss.detach(), **gradients, **buffers}, sum(kept.values())


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), f"{name} differs by {(actual[name] - value).abs().max():.3g}"


TOKENS = torch.arange(24).reshape(2, 12) % 11


@pytest.fixture(scope="module")
def plain() -> tuple[dict[str, Tensor], int]:
    return step(Transformer, TOKENS)


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({"recompute_plan": "gelu"}, 0.95),
        ({"recompute_plan": "attention_dropout"}, 0.99),
        ({"recompute_plan": "layers"}, 0.6),
        ({"recompute_plan": "layers:1"}, 0.8),
        ({"recompute_plan": "gelu,attention_dropout", "memory_budget": 0.7}, 0.7),
        *(({"memory_budget": tenths / 10}, tenths / 10) for tenths in (0, 2, 5, 9)),
        ({"memory_budget": "20KiB"}, 20 * 1024 / 86880),
    ],
    ids=str,
)
def test_gradients_do_not_change_and_fewer_bytes_are_saved(
    plain: tuple[dict[str, Tensor], int], options: dict[str, Any], most: float
) -> None:
    expected, before = plain
    actual, kept = step(Transformer, TOKENS, **options)
    assert_equal(actual, expected)
    masks = 3 * (2 * 12 * 12 + 2 * 2 * 12 * 16) + 2 * 12 * 16  # random masks are always saved, one byte per entry
    assert kept <= max(most * before, masks)


def test_arithmetic_that_is_done_again_changes_no_gradient(
    plain: tuple[dict[str, Tensor], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, before = plain
    patch_facts(monkeypatch, repeated_bytes=0)
    actual, kept = step(Transformer, TOKENS)
    assert_equal(actual, expected)
    assert kept < 0.9 * before
    everything, least = step(Transformer, TOKENS, memory_budget=0.0)
    assert_equal(everything, expected)
    patch_facts(monkeypatch, repeated_bytes=None)
    assert step(Transformer, TOKENS, memory_budget=0.0)[1] == least


@pytest.mark.parametrize("options", [{"recompute_plan": "layers"}, {"memory_budget": 0.1}], ids=str)
def test_batch_norm_statistics_are_updated_once(options: dict[str, Any]) -> None:
    x = torch.randn(2, 4, 6, 6)
    expected, before = step(ConvNet, x)
    actual, kept = step(ConvNet, x, **options)
    assert_equal(actual, expected)
    assert actual["buffer layer1.1.num_batches_tracked"] == 2
    assert kept < 0.7 * before


class Counting(nn.Module):
    """Writes to buffers that its forward has read: BatchNorm's statistics, and one that scales."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 6)
        self.register_buffer("calls", torch.ones(8))
        self._checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self._inside, x, use_reentrant=False) if self._checkpointed else self._inside(x)
        self.calls.add_(1)
        return x.square().mean()

    def _inside(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.norm(self.up(x))) * self.calls.cos())


@pytest.mark.parametrize(
    ("checkpointed", "options"),
    [
        (False, {"memory_budget": 0.0}),
        (False, {"recompute_plan": "Gemm+:1:-1,BatchNormalization+Tanh+:1:-1"}),
        (True, {}),
        (True, {"memory_budget": 0.0}),
    ],
    ids=str,
)
def test_recompute_does_not_read_buffers_that_the_forward_mutated(checkpointed: bool, options: dict[str, Any]) -> None:
    x = torch.randn(5, 6)

    def gradients(checkpointed: bool, **options: Any) -> dict[str, Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Counting(checkpointed)
        compiled = torch.compile(model, backend="ort_train", options=options, fullgraph=True)
        for _ in range(2):
            model.zero_grad()
            compiled(x).backward()  # without hooks on saved tensors, so autograd checks that none was written to
        assert not eager_reasons()
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None} | dict(model.named_buffers())

    assert_equal(gradients(checkpointed, **options), gradients(False))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_reuse_dropout_masks_and_save_only_their_inputs(
    plain: tuple[dict[str, Tensor], int], reentrant: bool
) -> None:
    expected, before = plain
    actual, kept = step(lambda: Transformer(checkpointed={"use_reentrant": reentrant}), TOKENS)
    assert_equal(actual, expected)
    assert kept < 0.4 * before


class Attention(nn.Module):
    """torch's fused attention: ATen tags it as random, but without dropout it is not."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 24) for _ in range(3))
        self._checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            attend = partial(self._attend, layer)
            x = checkpoint(attend, x, use_reentrant=False) if self._checkpointed else attend(x)
        return x.square().mean()

    @staticmethod
    def _attend(layer: nn.Module, x: Tensor) -> Tensor:
        query, key, value = layer(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + attended.transpose(1, 2).flatten(2)


@pytest.mark.parametrize(
    ("checkpointed", "options"),
    [
        (True, {}),
        (False, {"recompute_plan": "layers"}),
        (False, {"memory_budget": 0.0}),
        (False, {"recompute_plan": "Attention+:1:-1"}),
    ],
    ids=str,
)
def test_fused_attention_is_recomputed_in_onnx_runtime(checkpointed: bool, options: dict[str, Any]) -> None:
    x = torch.randn(2, 5, 8)
    expected, before = step(Attention, x)
    actual, kept = step(lambda: Attention(checkpointed), x, **options)  # step() tolerates no node in eager
    assert_equal(actual, expected)
    assert kept < 0.85 * before


def test_a_checkpoint_and_a_budget_go_together(plain: tuple[dict[str, Tensor], int]) -> None:
    expected, before = plain
    make = lambda: Transformer(checkpointed={"use_reentrant": False})  # noqa: E731
    actual, kept = step(make, TOKENS, memory_budget=0.2)
    assert_equal(actual, expected)
    assert kept < 0.2 * before


# -- selective checkpointing -------------------------------------------------------------------------------------


def save_products(_: object, operator: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    """A policy of torch's selective checkpointing."""
    products = (torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)
    return CheckpointPolicy.MUST_SAVE if operator in products else CheckpointPolicy.PREFER_RECOMPUTE


SELECTIVE = {"use_reentrant": False, "context_fn": partial(create_selective_checkpoint_contexts, save_products)}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"memory_budget": 0.0},
        {"memory_budget": 0.5},
        {"recompute_plan": "gelu,attention_dropout,layers"},
        {"recompute_plan": "Gather+Dropout+:1:-1"},
    ],
    ids=str,
)
def test_policies_of_selective_checkpointing_win_over_ours(
    plain: tuple[dict[str, Tensor], int], options: dict[str, Any]
) -> None:
    expected, before = plain
    make = partial(Transformer, checkpointed=SELECTIVE)
    actual, kept = step(make, TOKENS, **options)
    assert_equal(actual, expected)
    (graph,) = memory_plan(make(), TOKENS, options=options).graphs
    assert graph.record.nbytes == kept < before
    # Each layer has four matmuls of weights and two of attention. Those that the backward reads are always saved.
    # The rest of a layer saves only its inputs and masks.
    saved = Counter(one.operator for one in graph.record.saved)
    assert saved["aten.addmm.default"] == saved_by_policy()["aten.addmm.default"] > 0
    assert saved["aten.bmm.default"] == saved_by_policy()["aten.bmm.default"] > 0
    assert {one.by for one in graph.record.recomputed if one.operator == "aten.gelu.default"} == {
        "torch.utils.checkpoint"
    }


@cache
def saved_by_policy() -> Counter[str]:
    (graph,) = memory_plan(Transformer(checkpointed=SELECTIVE), TOKENS).graphs
    return Counter(one.operator for one in graph.record.saved)


# -- plans -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "plans",
    [
        "Gelu+:1:-1",
        "Dropout+:1:2,LayerNormalization+:1:1",
        "Gemm+Dropout+Add+:1:-1",
        "MatMul+Div+Softmax+:1:-1",
        "Gather+Dropout+:1:-1,Gemm+:1:-1",
    ],
)
def test_a_plan_changes_no_gradient_and_saves_the_bytes_in_its_table(
    plain: tuple[dict[str, Tensor], int], plans: str
) -> None:
    expected, before = plain
    (graph,) = memory_plan(Transformer(), TOKENS, options={"recompute_plan": plans}).graphs
    actual, kept = step(Transformer, TOKENS, recompute_plan=plans)
    assert_equal(actual, expected)
    assert (graph.record.nbytes_without, graph.record.nbytes) == (before, kept)
    saved = {str(row.plan): row.nbytes for row in graph.rows}
    if plans in saved:
        assert before - kept == saved[plans]
    assert {one.by for one in graph.record.recomputed} == {"recompute_plan"}


@pytest.mark.parametrize(("make", "x"), [(Transformer, TOKENS), (ConvNet, torch.randn(2, 4, 6, 6))])
def test_all_plans_together_change_no_gradient_and_no_statistics(make: Callable[[], nn.Module], x: Tensor) -> None:
    (graph,) = memory_plan(make(), x).graphs
    plans = [str(row.plan) for row in graph.rows]
    assert len(plans) >= 3
    expected, before = step(make, x)
    actual, kept = step(make, x, recompute_plan=plans)
    assert_equal(actual, expected)
    (graph,) = memory_plan(make(), x, options={"recompute_plan": plans}).graphs
    assert (graph.record.nbytes_without, graph.record.nbytes) == (before, kept)
    assert kept < 0.1 * before


def test_a_compromise_changes_no_gradient(tmp_path: Path) -> None:
    class Autocast(nn.Module):
        """A float32 softmax between bfloat16 matmuls, as under autocast."""

        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16))

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return torch.softmax(self.net(x).float(), -1).square().sum()

    x = torch.randn(4, 8)
    (graph,) = memory_plan(Autocast(), x).graphs
    compromises = [str(row.plan) for row in graph.rows if row.plan.type == 2]
    assert compromises
    path = tmp_path / "plans.json"
    path.write_text(json.dumps(compromises))
    # A recomputed value is not rounded on the way to its reader, a saved one is; unless all are.
    expected, before = step(Autocast, x, excess_precision=False)
    actual, kept = step(Autocast, x, recompute_plan=path, excess_precision=False)
    assert_equal(actual, expected)
    (graph,) = memory_plan(Autocast(), x, options={"recompute_plan": path}).graphs
    assert graph.record.nbytes == kept < before


@pytest.mark.parametrize("budget", [1.5, -0.1, "-3GiB", "2", "much", True, float("nan")])
def test_a_bad_budget_is_refused(budget: object) -> None:
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=r"InvalidOptionError: .*'memory_budget'"):
        torch.compile(nn.Linear(2, 2), backend="ort_train", options={"memory_budget": budget})(torch.ones(1, 2))
