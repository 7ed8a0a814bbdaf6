"""The examples of the documents of ORTTrainer and ORTTrainerOptions run, with small models in the place of "...".

Slips of the examples, which could not run in the old package either, and their corrections:

| example | slip | correction |
|---|---|---|
| options | `LinearWarmupLRScheduler()` lacks `total_steps` | `LinearWarmupLRScheduler(total_steps)` |
| options | `amp.LossScaler(...)` is abstract: the first update raises | `amp.DynamicLossScaler(...)` |
| options | `device.id` is "cuda:0" | "cpu" on a machine without CUDA |
| trainer | the keyword `param_groups` was called `params` | both are taken |
| trainer | 'model_param0' and the like are names of no weights | names as in the model's state_dict |
| trainer | two of the five inputs are labels, and loss_fn takes one | the last is loss_fn's, the other the model's |
| state_dict | a brace too many closes the schema before train_step_info | it is a section like the others |
| first trainer | no word on the source of the loss scale | the last input, or `loss_scaler` |
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ort_dynamo import ORTTrainer, ORTTrainerOptions, amp, optim
from ort_dynamo.testing import assert_close
from ort_dynamo.training import ort_trainer

VOCABULARY, WIDTH = 24, 8


class Bert(nn.Module):
    """The five inputs of the example but the last; gives the language model's loss and the next sentence's logits."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.types = nn.Embedding(2, WIDTH)
        self.model_param0 = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)
        self.model_param1 = nn.Parameter(torch.randn(WIDTH, VOCABULARY) / 3)
        self.model_param_2 = nn.Parameter(torch.randn(WIDTH, 2) / 3)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor, masked_lm_labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        embedded = self.words(input_ids) + self.types(token_type_ids)
        hidden = torch.tanh(embedded @ self.model_param0) * attention_mask.unsqueeze(-1)
        words = (hidden @ self.model_param1).flatten(0, 1)
        return nn.functional.cross_entropy(words, masked_lm_labels.flatten()), hidden.mean(1) @ self.model_param_2


def add_next_sentence(prediction: tuple[Tensor, Tensor], label: Tensor) -> Tensor:
    masked_lm_loss, logits = prediction
    return masked_lm_loss + nn.functional.cross_entropy(logits, label.squeeze(1))


MODEL_DESC: dict[str, Any] = {
    "inputs": [
        ("input_ids", ["batch", "max_seq_len_in_batch"]),
        ("attention_mask", ["batch", "max_seq_len_in_batch"]),
        ("token_type_ids", ["batch", "max_seq_len_in_batch"]),
        ("masked_lm_labels", ["batch", "max_seq_len_in_batch"]),
        ("next_sentence_label", ["batch", 1]),
    ],
    "outputs": [
        ("loss", [], True),
    ],
}


def bert() -> Bert:
    torch.manual_seed(0)
    return Bert()


def batch(size: int, length: int) -> list[Tensor]:
    torch.manual_seed(size * length)
    mask = torch.ones(size, length)
    mask[0, length // 2 :] = 0
    shape = (size, length)
    labels = [torch.randint(0, VOCABULARY, shape), torch.randint(0, 2, (size, 1))]
    return [torch.randint(0, VOCABULARY, shape), mask, torch.randint(0, 2, shape), *labels]


def options_example(lr_scheduler: Any, loss_scaler: Any, device: str, steps: int = 128) -> ORTTrainerOptions:
    return ORTTrainerOptions(
        {
            "batch": {"gradient_accumulation_steps": steps},
            "device": {
                "id": device,
                "mem_limit": 2 * 1024 * 1024 * 1024,
            },
            "lr_scheduler": lr_scheduler,
            "mixed_precision": {"enabled": True, "loss_scaler": loss_scaler},
        }
    )


def test_the_example_of_the_options_makes_options() -> None:
    with pytest.raises(TypeError, match="total_steps"):
        optim.lr_scheduler.LinearWarmupLRScheduler()  # type: ignore[call-arg]
    scheduler = optim.lr_scheduler.LinearWarmupLRScheduler(100)
    opts = options_example(scheduler, amp.LossScaler(loss_scale=float(1 << 16)), "cuda:0")
    fp16_enabled = opts.mixed_precision.enabled
    assert fp16_enabled is True
    assert (opts.batch.gradient_accumulation_steps, opts.device.id, opts.device.mem_limit) == (128, "cuda:0", 2**31)
    assert opts.lr_scheduler is scheduler
    if not torch.cuda.is_available():
        trainer = ORTTrainer(bert(), MODEL_DESC, optim.LambConfig(), add_next_sentence, opts)
        with pytest.raises(RuntimeError, match=r"device\.id = 'cuda:0', and torch .* finds no such device"):
            trainer.train_step(*batch(4, 6))


def test_the_options_train_once_they_are_corrected() -> None:
    scheduler = optim.lr_scheduler.LinearWarmupLRScheduler(4, warmup=0.5)
    scaler = amp.DynamicLossScaler(loss_scale=float(1 << 16))
    opts = options_example(scheduler, scaler, "cpu", steps=2)
    trainer = ORTTrainer(bert(), MODEL_DESC, optim.LambConfig(), add_next_sentence, opts)
    given = batch(4, 6)
    losses = [float(trainer.train_step(*given)) for _ in range(6)]
    assert losses[0] == losses[1] == losses[2] == losses[3] > losses[4]  # the first update has the rate 0
    assert trainer._train_step_info.optimization_step == 3
    assert scaler._stable_steps_count == 3
    opts.mixed_precision.loss_scaler = amp.LossScaler(loss_scale=float(1 << 16))
    trainer.train_step(*given)
    with pytest.raises(NotImplementedError):
        trainer.train_step(*given)


def test_the_example_of_the_trainer_trains() -> None:
    optim_config = optim.LambConfig(
        param_groups=[
            {"params": ["model_param0"], "alpha": 0.8, "beta": 0.7},
            {"params": ["model_param1", "model_param_2"], "alpha": 0.0},
        ],
        alpha=0.9,
        beta=0.999,
    )
    model, loss_fn = bert(), add_next_sentence
    ort_trainer = ORTTrainer(model, MODEL_DESC, optim_config, loss_fn)
    given, start = batch(4, 6), dict(model.named_parameters())
    expected = loss_fn(model(*given[:-1]), given[-1])
    expected.backward()
    assert_close(ort_trainer.train_step(*given).cpu(), expected.detach(), "loss")
    gradients = {name: one.grad for name, one in start.items() if one.grad is not None}
    norm = torch.stack([one.norm() for one in gradients.values()]).norm()
    state, weights = ort_trainer.state_dict(), ort_trainer.state_dict(pytorch_format=True)
    for name, alpha in {"model_param0": 0.8, "model_param1": 0.0, "model_param_2": 0.0, "words.weight": 0.9}.items():
        moment = torch.from_numpy(state["optimizer"][name]["Moment_1"])
        assert_close(moment, (1 - alpha) * gradients[name] / norm.clamp(min=1.0), name)
        assert not torch.equal(weights[name], start[name])
    names = [name for name, _ in MODEL_DESC["inputs"]]
    other = batch(3, 9)  # the named sizes change from step to step, and inputs may be given by name
    assert ort_trainer.train_step(**dict(zip(names, other, strict=True))).shape == ()


def test_the_state_has_the_documented_schema() -> None:
    placeholders = [{"params": ["model_param0", "model_param2"], "alpha": 0.8}]
    trainer = ORTTrainer(bert(), MODEL_DESC, optim.AdamConfig(param_groups=placeholders), add_next_sentence)
    with pytest.warns(UserWarning, match=re.escape("parameters that the model does not have: ['model_param2']")):
        trainer.train_step(*batch(4, 6))
    state = trainer.state_dict()
    names = list(dict(bert().named_parameters()))
    assert state.keys() == {"model", "optimizer", "trainer_options", "train_step_info"}
    assert state["model"].keys() == {"full_precision"}
    assert sorted(state["model"]["full_precision"]) == sorted(state["optimizer"]) == sorted(names)
    for own in state["optimizer"].values():
        assert own.keys() == {"Moment_1", "Moment_2", "Update_Count"}
        assert all(isinstance(one, np.ndarray) for one in own.values())
    assert {name: type(value) for name, value in state["trainer_options"].items()} == {
        "mixed_precision": bool,
        "zero_stage": int,
        "world_rank": int,
        "world_size": int,
        "optimizer_name": str,
        "data_parallel_size": int,
        "horizontal_parallel_size": int,
    }
    assert state["train_step_info"] == {"optimization_step": 1, "step": 1}
    flat = trainer.state_dict(pytorch_format=True)
    assert sorted(flat) == sorted(names)
    bert().load_state_dict({name: one.cpu() for name, one in flat.items()})


def test_the_first_trainer_trains_the_same_model() -> None:
    inputs = [ort_trainer.IODescription(name, shape) for name, shape in MODEL_DESC["inputs"]]
    description = ort_trainer.ModelDescription(inputs, [ort_trainer.IODescription("loss", [], torch.float32)])
    rate = ort_trainer.IODescription("Learning_Rate", [1], torch.float32)
    first = ort_trainer.ORTTrainer(bert(), add_next_sentence, description, "AdamOptimizer", None, rate, "cpu")
    options = ORTTrainerOptions({"device": {"id": "cpu"}})
    new = ORTTrainer(bert(), MODEL_DESC, optim.AdamConfig(lr=0.25), add_next_sentence, options)
    for _ in range(3):
        loss = first.train_step(*batch(4, 6), torch.tensor([0.25]))
        assert torch.equal(loss, new.train_step(*batch(4, 6)))
