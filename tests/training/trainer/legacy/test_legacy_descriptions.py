"""Section 2.4 of ORTTrainer's reference: the descriptions of the first ORTTrainer."""

from __future__ import annotations

import torch

from ort_dynamo.training.legacy_descriptions import IODescription, ModelDescription
from ort_dynamo.training.model_desc_validation import _ORTTrainerModelDesc


def test_an_old_description_is_a_new_one_with_the_loss_first() -> None:
    image = IODescription("image", ("batch", 784), torch.float32)
    label = IODescription("label", ["batch"], torch.int64, num_classes=10)
    assert (label.name_, label.shape_, label.dtype_, label.num_classes_) == ("label", ["batch"], torch.int64, 10)
    loss, logits = IODescription("loss", []), IODescription("logits", ["batch", 10])
    description = ModelDescription([image, label], [loss, logits])
    assert (description.inputs_, description.outputs_) == ([image, label], [loss, logits])
    model_desc = description.as_model_desc()
    assert model_desc == {
        "inputs": [("image", ["batch", 784]), ("label", ["batch"])],
        "outputs": [("loss", [], True), ("logits", ["batch", 10], False)],
    }
    assert _ORTTrainerModelDesc(model_desc).loss_index == 0
