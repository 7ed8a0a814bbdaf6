"""Section 2.2 of ORTTrainer's reference: options of recomputation and casts have their effect."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_trainers import SGD, batches, make_trainer
from torch import Tensor, nn

from ort_dynamo import PropagateCastOpsStrategy
from ort_dynamo.report.record import RECORDS, CompileRecord


def passes_of(record: CompileRecord) -> list[str]:
    """List the passes that ran on the models of a compile, with parameters."""
    islands = [island for graph in record.graphs for island in graph.islands]
    return [one.name for island in islands for one in island.build.passes]


class Layer(nn.Module):
    """A transformer layer with dropout on attention's weights."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(F.dropout(torch.softmax(q @ k.transpose(-1, -2), -1), 0.2, self.training) @ v)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Three of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


TRANSFORMER: dict[str, Any] = {"inputs": [("x", [2, 5, 8])], "outputs": [("loss", [], True)]}


def transformer(**levels: Any) -> tuple[list[float], CompileRecord]:
    """Losses of three steps with separate forward and backward graphs, and the record of the compile."""
    torch.manual_seed(3)
    trainer = make_trainer(SGD, Transformer(), desc=TRANSFORMER, loss_fn=None, one_session=False, **levels)
    x = torch.randn(2, 5, 8)
    torch.manual_seed(4)
    found = [float(trainer.train_step(x)) for _ in range(3)]
    assert trainer._running is not None
    assert trainer._running._split is not None
    (record,) = trainer._running._split.records
    assert record.partition is not None
    return found, record


@pytest.fixture(scope="module")
def kept() -> tuple[list[float], int]:
    found, record = transformer()
    assert record.partition is not None
    return found, record.partition.memory.nbytes


@pytest.mark.parametrize(
    ("levels", "by", "most"),
    [
        ({"graph_transformer": {"attn_dropout_recompute": True}}, "RecomputeAttentionDropout", 0.99),
        ({"graph_transformer": {"gelu_recompute": True}}, "RecomputeGelu", 0.97),
        pytest.param(
            {"graph_transformer": {"transformer_layer_recompute": True}}, "RecomputeLayers", 0.5, marks=pytest.mark.slow
        ),
        (
            {"graph_transformer": {"transformer_layer_recompute": True, "number_recompute_layers": 1}},
            "RecomputeLayers(number_recompute_layers=1",
            0.75,
        ),
        ({"utils": {"memory_efficient_gradient": True}}, "RecomputeFromInputs", 0.97),
    ],
    ids=["attention dropout", "gelu", "layers", "one layer", "from inputs"],
)
def test_recompute_options_save_fewer_bytes_and_keep_the_loss(
    kept: tuple[list[float], int], levels: dict[str, Any], by: str, most: float
) -> None:
    found, record = transformer(**levels)
    assert found == pytest.approx(kept[0], rel=1e-6)
    assert record.partition is not None
    (ran,) = [one for one in record.partition.passes if one.name.startswith(by.partition("(")[0])]
    assert ran.modified
    assert record.partition.memory.nbytes < most * kept[1]
    if "number_recompute_layers" in str(levels):
        assert record.partition.memory.nbytes > 0.5 * kept[1]


@pytest.mark.filterwarnings("ignore:recomputing layers changes nothing")
@pytest.mark.parametrize("flag", ["attn_dropout_recompute", "gelu_recompute", "transformer_layer_recompute"])
def test_a_step_that_recomputes_has_a_backward_of_its_own(flag: str) -> None:
    trainer = make_trainer(graph_transformer={flag: True})
    trainer.train_step(*batches(1)[0])
    assert trainer._running is not None
    assert not trainer._running.in_one_session


CASTS = {
    "strategy": PropagateCastOpsStrategy.INSERT_AND_REDUCE,
    "level": 2,
    "allow": ["Sin"],
}


def test_cast_options_are_those_of_the_pass() -> None:
    trainer = make_trainer(
        mixed_precision={"enabled": True},
        graph_transformer={"propagate_cast_ops_config": CASTS, "allow_layer_norm_mod_precision": True},
    )
    trainer.train_step(*batches(1)[0])
    (name,) = [one for one in passes_of(list(RECORDS)[-1]) if one.startswith("PropagateCasts")]
    assert "INSERT_AND_REDUCE" in name
    assert "level=2" in name
    assert "allow=('Sin',)" in name
    assert "allow_layer_norm_mod_precision=True" in name
    trainer = make_trainer(mixed_precision={"enabled": True})
    trainer.train_step(*batches(1)[0])
    (name,) = [one for one in passes_of(list(RECORDS)[-1]) if one.startswith("PropagateCasts")]
    assert "FLOOD_FILL" in name
    assert "level=1" in name
    assert "allow=()" in name
    assert "allow_layer_norm_mod_precision=False" in name
