"""Programs of ranks that share layers; adjacent ranks have the same share of a batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from replicated import joined, make, share, train
from small_trainers import make_options
from torch import Tensor, nn

from ort_dynamo import ORTTrainer, optim

__all__ = ["CASES", "MODELS", "Attention", "TooManyHeads", "cases", "model_steps", "models"]


class Attention(nn.Module):
    """Attention over two tokens, a layer norm, two linear layers, and one that is not divided."""

    heads: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(2, 8)
        self.block = nn.ModuleDict(
            {"q_proj": nn.Linear(8, 8), "k_proj": nn.Linear(8, 8), "v_proj": nn.Linear(8, 8), "o_proj": nn.Linear(8, 8)}
        )
        self.norm = nn.LayerNorm(8)
        self.feed = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.head = nn.Linear(8, 3)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, input1: Tensor) -> Tensor:
        x = self.embed(input1.view(-1, 2, 2))
        q, k, v = (
            self.block[name](x).view(*x.shape[:2], self.heads or -1, 2).transpose(1, 2)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.block["o_proj"](mixed)
        return self.head((x + self.feed(self.norm(x))).mean(1) * self.scale)


class TooManyHeads(Attention):
    """Takes it for granted that there are four heads."""

    heads = 4


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (optim.SGDConfig(lr=0.1), {}),
    "adam": (optim.AdamConfig(lr=0.01, max_norm_clip=0.05), {}),
    "lamb": (optim.LambConfig(lr=0.02, max_norm_clip=0.05, lambda_coef=0.01), {}),
    "accumulation": (optim.AdamConfig(lr=0.01), {"batch": {"gradient_accumulation_steps": 4}}),
    "accumulation, then reduction": (
        optim.AdamConfig(lr=0.01),
        {"batch": {"gradient_accumulation_steps": 4}, "distributed": {"allreduce_post_accumulation": True}},
    ),
}


def cases(rank: int, world: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    own = share(joined(24), rank // 2, world // 2)
    for name, (config, levels) in CASES.items():
        divided = {**levels, "distributed": {"horizontal_parallel_size": 2, **levels.get("distributed", {})}}
        trainer = make(rank, world, config, divided, Attention)
        losses = train(trainer, own[:20])
        trainer.save_checkpoint(folder / f"{name}-{rank}")
        elements = trainer._running.state.elements  # type: ignore[union-attr]
        losses += train(trainer, own[20:])
        paths = [folder / f"{name}-{one}" for one in range(world)]
        torch.distributed.barrier()
        trainer.load_checkpoint(*paths)
        again = train(trainer, own[20:])
        assert again == losses[20:], (again, losses[20:])
        found[name] = {"losses": losses, "elements": elements, "eval": float(trainer.eval_step(*own[0])[0])}
    refused = make(rank, world, CASES["sgd"][0], {"distributed": {"horizontal_parallel_size": 2}}, TooManyHeads)
    try:
        refused.train_step(*own[0])
    except NotImplementedError as error:
        found["refused"] = str(error)
    return found


# -- models as they are ----------------------------------------------------------------------------------------------


class Encoder(nn.Module):
    """torch's own encoder layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 32)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(input_ids)))


class Logits(nn.Module):
    """The logits of a transformers model, by whose own plan, if it has one, layers are divided."""

    def __init__(self, name: str) -> None:
        super().__init__()
        import transformers

        sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 32}
        more = {"intermediate_size": 32, "max_position_embeddings": 16}
        if name == "llama":
            config = transformers.LlamaConfig(**sizes, **more, num_key_value_heads=2)
            self.model = transformers.LlamaForCausalLM(config)
        else:
            without = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
            self.model = transformers.BertForMaskedLM(transformers.BertConfig(**sizes, **more, **without))

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.model(input_ids=input_ids).logits


TOKENS: dict[str, Any] = {
    "inputs": [("input_ids", ["batch", "length"]), ("label", ["batch", "length"])],
    "outputs": [("loss", [], True), ("logits", ["batch", "length", 32])],
}
MODELS = ("encoder", "llama", "bert")


def model_steps(name: str, rank: int, world: int) -> tuple[list[float], int]:
    """Losses of five steps and one evaluation, and how many numbers this rank trains."""
    torch.manual_seed(rank + 1)
    model = Encoder() if name == "encoder" else Logits(name)
    distributed = {"world_size": world, "world_rank": rank, "local_rank": rank, "horizontal_parallel_size": world}
    options = make_options(distributed=distributed)
    trainer = ORTTrainer(model, TOKENS, optim.AdamConfig(lr=0.01), next_token, options)
    generator = torch.Generator().manual_seed(0)
    data = [torch.randint(0, 32, (2, 8), generator=generator) for _ in range(5)]
    losses = [float(trainer.train_step(tokens, tokens.roll(-1, 1))[0]) for tokens in data]
    losses.append(float(trainer.eval_step(data[0], data[0].roll(-1, 1))[0]))
    running = trainer._running
    assert running is not None
    return losses, running.state.elements


def next_token(logits: Tensor, label: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), label.flatten())


def models(rank: int, world: int) -> dict[str, Any]:
    return {name: model_steps(name, rank, world) for name in MODELS}
