"""Every module of torch.nn in training and in evaluation: forward and gradients, compiled against eager."""

from __future__ import annotations

import pytest
from module_samples import assert_module_like_eager, modules, samples_of_module

FAKE_SHAPES = {
    ("nn.MultiLabelMarginLoss", "1d_reduction_none"): "torch's fake tensor has one dimension more than its result",
}
"""Samples for which torch's fake results differ from eager; aot_eager has the same difference."""

NOT_CAPTURED = {
    "nn.CTCLoss": "the shape of its loss depends on data to Dynamo, which leaves it to eager",
    "nn.GaussianNLLLoss": "it looks at its variance's data, and Dynamo leaves it to eager",
}


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", modules())
def test_a_module_gives_eagers_results(name: str, training: bool) -> None:
    samples = list(samples_of_module(modules()[name], training))
    module, sample = samples[0]
    assert assert_module_like_eager(module, sample) != (name in NOT_CAPTURED)


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", modules())
def test_a_module_gives_eagers_results_for_every_sample(name: str, training: bool) -> None:
    for module, sample in samples_of_module(modules()[name], training):
        if (name, sample.desc) in FAKE_SHAPES:
            with pytest.raises(AssertionError, match="has shape"):
                assert_module_like_eager(module, sample)
        else:
            assert_module_like_eager(module, sample)
