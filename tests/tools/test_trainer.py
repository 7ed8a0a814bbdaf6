"""transformers.Trainer and accelerate train as in eager, under the name that their enum knows."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ort_dynamo

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

# Their warnings are about their own code and about installed packages.
pytestmark = pytest.mark.filterwarnings("ignore")

TINY = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


def make_model(name: str) -> Any:
    torch.manual_seed(0)
    match name:
        case "gpt2":
            sizes = {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 64, "n_positions": 16}
            return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **TINY))
        case "bert":
            sizes = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
            return transformers.BertForMaskedLM(transformers.BertConfig(**sizes, vocab_size=64))
        case _:
            sizes = {"num_layers": 2, "d_model": 16, "num_heads": 2, "d_kv": 8, "d_ff": 32, "vocab_size": 64}
            config = transformers.T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1)
            return transformers.T5ForConditionalGeneration(config)


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    """Restore the environment variables that TrainingArguments and Accelerator set."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows of 12 tokens, the same for each run."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(2, 64, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def train(name: str, folder: Path, **arguments: Any) -> list[float]:
    """The loss of each of three steps, and the loss of an evaluation."""
    torch._dynamo.reset()
    given = transformers.TrainingArguments(
        str(folder),
        max_steps=3,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=0,
        **arguments,
    )
    trainer = transformers.Trainer(model=make_model(name), args=given, train_dataset=Rows(), eval_dataset=Rows())
    trainer.train()
    evaluated: float = trainer.evaluate()["eval_loss"]
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry] + [evaluated]


FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "checkpointing": {"gradient_checkpointing": True},
    "bf16": {"bf16": True},
}


@pytest.mark.parametrize(
    ("name", "form"),
    [
        pytest.param(name, form, marks=[] if (name, form) == ("gpt2", "accumulation") else pytest.mark.slow)
        for name in ("bert", "gpt2", "t5")
        for form in FORMS
    ],
)
def test_trainer_trains_as_in_eager(name: str, form: str, tmp_path: Path) -> None:
    expected = train(name, tmp_path, **FORMS[form])
    assert ort_dynamo.summary().graphs == 0
    actual = train(name, tmp_path, **FORMS[form], torch_compile=True, torch_compile_backend="onnxrt")
    found = ort_dynamo.summary()
    assert found.native.total() > 100
    # T5 with checkpointing sets requires_grad in the middle of its forward, which Dynamo leaves out.
    assert not found.skipped or (name, form) == ("t5", "checkpointing")
    assert all(map(math.isfinite, actual))
    # bfloat16 holds eight bits, and eager rounds after each operator.
    assert actual == pytest.approx(expected, rel=2e-3 if form == "bf16" else 1e-5)


@pytest.mark.parametrize("regional", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_accelerate_trains_as_in_eager(regional: bool) -> None:
    tokens = torch.stack([Rows()[i]["input_ids"] for i in range(4)])

    def losses(plugin: Any) -> list[float]:
        accelerate.state.AcceleratorState._reset_state(True)
        accelerator = accelerate.Accelerator(cpu=True, dynamo_plugin=plugin)
        model = make_model("gpt2")
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        found = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            accelerator.backward(loss)
            optimizer.step()
            found.append(loss.item())
        return found

    expected = losses(None)
    plugin = accelerate.utils.TorchDynamoPlugin(
        backend="onnxrt", options={"fallback": "error"}, use_regional_compilation=regional
    )
    torch.manual_seed(0)
    assert losses(plugin) == pytest.approx(expected, rel=1e-5)
    found = ort_dynamo.summary()
    assert found.native.total() > 50
    # Four layers a block, and two blocks, which are one compile where each is compiled by itself.
    assert found.native["aten.addmm.default"] == (4 if regional else 8)


LAUNCHED = """
import torch
from accelerate import Accelerator

import ort_dynamo

accelerator = Accelerator()
model, x = accelerator.prepare(torch.nn.Linear(4, 2)), torch.ones(3, 4)
accelerator.backward(model(x).square().mean())
print(ort_dynamo.summary())
"""


@pytest.mark.slow
def test_accelerates_launcher_takes_the_backend(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(LAUNCHED)
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--dynamo_backend", "onnxrt", "program.py"]
    done = subprocess.run(launch, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "ort_train: compiles 1, graphs 2" in done.stdout
