"""A trainer names the input whose dtype the model does not take."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ort_dynamo import optim
from ort_dynamo.errors import InputDtypeError

DESCRIPTION = {
    "inputs": [("image", ["batch", 4]), ("label", ["batch"])],
    "outputs": [("loss", [], True), ("scores", ["batch", 3])],
}


def trainer() -> ORTTrainer:
    torch.manual_seed(0)
    config = optim.SGDConfig(lr=0.1)
    return ORTTrainer(
        nn.Linear(4, 3), DESCRIPTION, config, lambda scores, label: nn.functional.cross_entropy(scores, label)
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int64])
def test_an_input_of_another_dtype_is_named(dtype: torch.dtype) -> None:
    label = torch.tensor([0, 1])
    made = trainer()
    with pytest.raises(InputDtypeError, match="must have the same dtype") as raised:
        made.train_step(torch.ones(2, 4).to(dtype), label)
    assert f"'image' is {str(dtype).removeprefix('torch.')}" in str(raised.value)
    assert "the model's weights are float32" in str(raised.value)
    assert isinstance(raised.value, RuntimeError)
    with pytest.raises(InputDtypeError, match="'image' is"):
        made.eval_step(torch.ones(2, 4).to(dtype), label)
    loss, _ = made.train_step(torch.ones(2, 4), label)  # nothing is left behind
    assert loss.isfinite()


def test_a_label_of_another_dtype_is_named() -> None:
    with pytest.raises(InputDtypeError, match="'label' is int32"):
        trainer().train_step(torch.ones(2, 4), torch.tensor([0, 1], dtype=torch.int32))
