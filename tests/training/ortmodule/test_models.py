"""Models that people train go through ORTModule as through eager: in a plain loop, and in transformers.Trainer."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import compiles
from torch import Tensor

import ort_dynamo
from ort_dynamo import ORTModule
from ort_dynamo.testing import assert_close

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own

TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
Batch = Callable[[int, int], dict[str, Tensor]]


def bert() -> tuple[Any, Batch]:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**sizes, vocab_size=64))

    def batch(rows: int, length: int) -> dict[str, Tensor]:
        mask = torch.ones(rows, length, dtype=torch.long)
        mask[::2, length // 2 :] = 0
        return {
            "input_ids": torch.randint(2, 64, (rows, length)),
            "attention_mask": mask,
            "labels": torch.randint(2, (rows,)),
        }

    return model, batch


def gpt2() -> tuple[Any, Batch]:
    sizes = {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 32}

    def batch(rows: int, length: int) -> dict[str, Tensor]:
        tokens = torch.randint(2, 64, (rows, length))
        return {"input_ids": tokens, "labels": tokens}

    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **TOKENS)), batch


def t5() -> tuple[Any, Batch]:
    sizes = {"num_layers": 1, "d_model": 32, "num_heads": 2, "d_kv": 16, "d_ff": 64, "vocab_size": 64}
    config = transformers.T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1)

    def batch(rows: int, length: int) -> dict[str, Tensor]:
        return {
            "input_ids": torch.randint(2, 64, (rows, length)),
            "labels": torch.randint(2, 64, (rows, length - 1)),
        }

    return transformers.T5ForConditionalGeneration(config), batch


def vit() -> tuple[Any, Batch]:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.ViTConfig(**sizes, image_size=16, patch_size=8, num_labels=4)
    return transformers.ViTForImageClassification(config), _images(16)


def resnet() -> tuple[Any, Batch]:
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
    return transformers.ResNetForImageClassification(transformers.ResNetConfig(**sizes, num_labels=4)), _images(32)


def _images(side: int) -> Batch:
    def batch(rows: int, length: int) -> dict[str, Tensor]:
        return {"pixel_values": torch.randn(rows, 3, side, side), "labels": torch.randint(4, (rows,))}

    return batch


MODELS = {"bert": bert, "gpt2": gpt2, "t5": t5, "vit": vit, "resnet": resnet}


@pytest.mark.parametrize(
    "name", ["bert", "gpt2", "resnet", *(pytest.param(name, marks=pytest.mark.slow) for name in ("t5", "vit"))]
)
def test_a_loop_trains_as_eager_does_and_a_third_shape_compiles_nothing(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    model.train()
    ort_model = ORTModule(copy.deepcopy(model))
    optimizers = [torch.optim.SGD(one.parameters(), lr=1e-2, momentum=0.9) for one in (ort_model, model)]
    compiled = []
    for step, (rows, length) in enumerate([(4, 8), (3, 10), (5, 7), (2, 12), (4, 8)]):
        given = batch(rows, length)
        losses = []
        for one, optimizer in zip((ort_model, model), optimizers, strict=True):
            torch.manual_seed(step)
            loss = one(**given).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        assert_close(losses[0], losses[1], f"loss of step {step}")
        compiled.append(compiles())
    assert compiled[1:] == [compiled[1]] * 4
    assert ort_dynamo.summary().eager_nodes == 0

    given = batch(3, 9)
    with torch.no_grad():
        assert_close(ort_model.eval()(**given).logits, model.eval()(**given).logits, "logits in eval mode")
    ort_model.train()
    before = compiles()
    ort_model(**batch(6, 6)).loss.backward()
    assert compiles() == before

    ort_model.module.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    for key, value in ort_model.state_dict().items():
        assert_close(again.state_dict()[key], value, key)


@pytest.fixture
def same_environment() -> Iterator[None]:
    """Restore the environment variables that TrainingArguments sets."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Single rows of a model's batches; rows without a length are of one size."""

    def __init__(self, batch: Batch) -> None:
        torch.manual_seed(1)
        self.rows = [{key: value[0] for key, value in batch(1, 8).items()} for _ in range(24)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.rows[index]


@pytest.mark.usefixtures("same_environment")
@pytest.mark.parametrize(
    "name", ["gpt2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("bert", "t5", "vit", "resnet"))]
)
def test_the_trainer_trains_as_eager_does(name: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    found = []
    for wrap in (True, False):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, batch = MODELS[name]()
        arguments = transformers.TrainingArguments(
            str(tmp_path / str(wrap)),
            max_steps=4,
            per_device_train_batch_size=4,
            per_device_eval_batch_size=5,
            gradient_accumulation_steps=2,
            learning_rate=1e-3,
            label_names=["labels"],  # which Trainer otherwise reads off the class of the model
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            seed=0,
        )
        trainer = transformers.Trainer(
            model=ORTModule(model) if wrap else model,
            args=arguments,
            train_dataset=Rows(batch),
            eval_dataset=Rows(batch),
        )
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        found.append([*losses, trainer.evaluate()["eval_loss"]])
        if wrap:
            assert compiles() > 0
            assert trainer.model is not model
            trainer.save_model(str(tmp_path / "saved"))
            assert (tmp_path / "saved" / "model.safetensors").exists()
    assert found[0] == pytest.approx(found[1], rel=1e-4)
