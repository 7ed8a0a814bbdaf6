"""A trainer names the input whose dtype the model does not take."""

from __future__ import annotations

import pytest
import torch
from small_trainers import batches, make_trainer

from ort_dynamo.errors import InputDtypeError


@pytest.mark.parametrize("one_session", [True, False], ids=["one session", "two halves"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int64])
def test_an_input_of_another_dtype_is_named(dtype: torch.dtype, one_session: bool) -> None:
    x, label = batches(1)[0]
    trainer = make_trainer(one_session=one_session)
    with pytest.raises(InputDtypeError, match="must have the same dtype") as raised:
        trainer.train_step(x.to(dtype), label)
    assert f"'input1' is {str(dtype).removeprefix('torch.')}" in str(raised.value)
    assert "the model's weights are float32" in str(raised.value)
    assert isinstance(raised.value, RuntimeError)
    with pytest.raises(InputDtypeError, match="'input1' is"):
        trainer.eval_step(x.to(dtype), label)
    loss, _ = trainer.train_step(x, label)  # nothing is left behind
    assert loss.isfinite()


def test_a_label_of_another_dtype_is_named() -> None:
    x, label = batches(1)[0]
    with pytest.raises(InputDtypeError, match="'label' is int32"):
        make_trainer().train_step(x, label.to(torch.int32))
