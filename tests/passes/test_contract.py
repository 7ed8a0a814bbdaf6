"""All passes on many graphs: after each the graph is valid, fake values follow it, and a second run changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ort_dynamo.compilation import cut
from ort_dynamo.graph.build import PassRecord
from ort_dynamo.lowering import build_island
from ort_dynamo.passes.running import run_passes
from ort_dynamo.testing import patch_facts


class Net(nn.Module):
    """Calls a function with itself, so that a graph is one line and its parts."""

    def __init__(self, call: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        self.call = call
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, *args: Tensor) -> Any:
        return self.call(self, *args)


def conv(given: int = 3, made: int = 8, **form: Any) -> nn.Conv2d:
    return nn.Conv2d(given, made, 3, padding=1, **form)


def keeps_views(m: Any, x: Tensor) -> Any:
    h = m.c(x)
    tokens = h.permute(0, 2, 3, 1).contiguous().view(h.shape[0], -1, 8)
    return m.l(tokens).mean(1) + m.d(torch.relu(h)).mean((2, 3))


def residual(m: Any, x: Tensor) -> Tensor:
    h = m.c(x)
    return (torch.relu(m.b(m.d(h)) + h)).mean((2, 3))


def attends(m: Any, x: Tensor) -> Tensor:
    q, k, v = m.l(x).chunk(3, -1)
    return F.scaled_dot_product_attention(q, k, v).sum()


def blocks(m: Any, x: Tensor) -> Tensor:
    for layer in (m.a, m.b):
        x = x + layer(x)
    return x.square().mean()


def block() -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.Dropout(0.2))


def autocast(run: Callable[[], Tensor]) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return run()


def writes(m: Any, x: Tensor) -> Tensor:
    y = m.l(x)
    y[:, :4].mul_(2)
    m.n.running_mean.add_(1)
    return m.n(y).relu_().sum()


def is_random(m: Any, x: Tensor) -> Tensor:
    return m.l(x + torch.rand_like(x)) * torch.bernoulli(x.sigmoid())


def splits(m: Any, x: Tensor) -> Tensor:
    first, second, _ = m.l(x).split(3, 1)
    return first.sin() + second


def narrow(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return m.l(m.n(m.c(x)).flatten(1)).float().sum()


IMAGE, ROWS, VECTOR = (2, 3, 12, 12), (4, 6, 16), (4, 10)
ACTIVATIONS = (F.elu, F.relu6, F.hardswish, F.gelu, F.silu, F.softplus, F.leaky_relu, torch.tanh)
GRAPHS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "tokens of images": (lambda: Net(keeps_views, c=conv(), d=conv(8), l=nn.Linear(8, 8)), IMAGE),
    "residual": (lambda: Net(residual, c=conv(), d=conv(8), b=nn.BatchNorm2d(8)), IMAGE),
    "residual, evaluated": (lambda: Net(residual, c=conv(), d=conv(8), b=nn.BatchNorm2d(8)).eval(), IMAGE),
    "depthwise": (lambda: nn.Sequential(conv(), conv(8, 8, groups=8), nn.Hardswish(), nn.AvgPool2d(2)), IMAGE),
    "pools": (lambda: nn.Sequential(conv(), nn.MaxPool2d(2), conv(8), nn.AdaptiveAvgPool2d(1), nn.Flatten()), IMAGE),
    "images as results": (lambda: Net(lambda m, x: m.c(x).permute(0, 2, 3, 1).contiguous(), c=conv()), IMAGE),
    "one result twice": (lambda: Net(lambda m, x: [h := m.c(x), h.transpose(1, 2).contiguous(), h], c=conv()), IMAGE),
    "power": (lambda: Net(lambda m, x: m.l((2 ** m.c(x)).flatten(2)).sum(), c=conv(), l=nn.Linear(144, 2)), IMAGE),
    "upsampled": (lambda: nn.Sequential(conv(), nn.Upsample(scale_factor=2), conv(8)), IMAGE),
    "one dimension": (lambda: nn.Sequential(nn.Flatten(2), nn.Conv1d(3, 4, 5), nn.BatchNorm1d(4), nn.ReLU()), IMAGE),
    "narrow": (lambda: Net(narrow, c=conv(), n=nn.BatchNorm2d(8), l=nn.Linear(8 * 144, 3)), IMAGE),
    "group norm": (lambda: nn.Sequential(conv(), nn.GroupNorm(2, 8), nn.Mish(), conv(8)), IMAGE),
    "checkpoint": (
        lambda: Net(
            lambda m, x: checkpoint(m.s, m.c(x), use_reentrant=False), c=conv(), s=nn.Sequential(conv(8), nn.ELU())
        ),
        IMAGE,
    ),
    "dropout of images": (lambda: nn.Sequential(conv(), nn.Dropout(0.3), nn.ReLU(), conv(8)), IMAGE),
    "gate": (lambda: Net(lambda m, x: (h := m.c(x)) * h.mean((2, 3), keepdim=True).sigmoid(), c=conv()), IMAGE),
    **{
        f"decoder, {act.__name__}": (
            lambda act=act: Net(
                lambda m, z: m.t(act(m.l(z).view(-1, 8, 4, 4))),
                l=nn.Linear(10, 128),
                t=nn.ConvTranspose2d(8, 3, 4, 2, 1),
            ),
            VECTOR,
        )
        for act in ACTIVATIONS
    },
    "transformer": (lambda: Net(blocks, a=block(), b=block()), ROWS),
    "attention": (lambda: Net(attends, l=nn.Linear(16, 48)), ROWS),
    "writes": (lambda: Net(writes, l=nn.Linear(10, 8), n=nn.BatchNorm1d(8)), VECTOR),
    "random operators": (
        lambda: Net(lambda m, x: m.l(x + torch.rand_like(x)) * torch.bernoulli(x.sigmoid()), l=nn.Linear(10, 10)),
        VECTOR,
    ),
    "losses": (lambda: Net(lambda m, x: F.cross_entropy(m.l(x), torch.arange(4)), l=nn.Linear(10, 8)), VECTOR),
    "smoothed losses": (
        lambda: Net(lambda m, x: F.cross_entropy(m.l(x), torch.arange(4), label_smoothing=0.1), l=nn.Linear(10, 8)),
        VECTOR,
    ),
    "autocast": (
        lambda: Net(
            lambda m, x: autocast(lambda: m.b(m.n(m.a(x)))), a=nn.Linear(10, 8), n=nn.LayerNorm(8), b=nn.Linear(8, 3)
        ),
        VECTOR,
    ),
    "splits": (
        lambda: Net(lambda m, x: sum(one.sin() for one in m.l(x).split(3, 1) if one.shape[1] == 3), l=nn.Linear(10, 8)),
        VECTOR,
    ),
    "embedding": (lambda: Net(lambda m, x: m.e(x.argmax(1)).tanh().mean(), e=nn.Embedding(10, 6)), VECTOR),
}

SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "sessions": {"placement": "onnxruntime"},
    "recompute": {"memory_budget": 0.3, "recompute_plan": "gelu,attention_dropout"},
}


def test_there_are_graphs_enough() -> None:
    assert len(GRAPHS) >= 30


def cases() -> Iterator[Any]:
    """All graphs in the default setting, and each in one other one; the rest of the product is slow."""
    others = [(setting, dynamic) for setting in SETTINGS for dynamic in (False, True)][1:]
    for index, graph in enumerate(GRAPHS):
        yield pytest.param(graph, "default", False, id=f"{graph}-default-static")
        for place, (setting, dynamic) in enumerate(others):
            marks = () if place == index % len(others) else pytest.mark.slow
            name = f"{graph}-{setting}-{'dynamic' if dynamic else 'static'}"
            yield pytest.param(graph, setting, dynamic, id=name, marks=marks)


@pytest.mark.parametrize(("graph", "setting", "dynamic"), [*cases()])
def test_each_pass_leaves_a_valid_graph_and_nothing_to_do(
    graph: str, setting: str, dynamic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def each_twice(passes: Sequence[Any], gm: Any, **_: Any) -> tuple[PassRecord, ...]:
        records = run_passes([pass_ for pass_ in passes for _ in range(2)], gm, check=True)
        assert not [again.name for again in records[1::2] if again.modified]
        ran.extend(record.name for record in records)
        return records[::2]

    patch_facts(monkeypatch, section_bytes=256, repeated_bytes=1)
    for module in (cut, build_island):
        monkeypatch.setattr(module, "run_passes", each_twice)
    make, shape = GRAPHS[graph]
    module = make()
    x = torch.randn(shape, requires_grad=True)
    options = {**SETTINGS[setting], "debug": {"verify_values": True}}
    compiled = torch.compile(module, backend="ort_train", dynamic=dynamic, options=options)
    results = compiled(x)
    loss = sum(one.sum() for one in (results if isinstance(results, list) else [results]))
    loss.backward()  # type: ignore[union-attr]
    with torch.no_grad():
        compiled(x)
    assert any(name.startswith("Reinplace") for name in ran)
