"""The sweep of architectures works; its findings are in docs/internals/architectures.md."""

from __future__ import annotations

import pytest
import torch
from architecture_check import NotBuiltError, build, check
from training_step import as_near_as_rounded_weights, disturbed, training_step, verdict

pytestmark = pytest.mark.filterwarnings("ignore")  # the models warn about themselves


def test_a_text_model_is_built_compiled_and_compared_at_two_lengths() -> None:
    record = check("albert", evaluate=False)
    assert (record["kind"], record["head"], record["inputs"]) == ("same", "AlbertForMaskedLM", "labels")
    assert record["counts"]["native_nodes"] > 0
    assert not record["eager"]


@pytest.mark.parametrize(
    ("model_type", "inputs"), [("qwen2_vl", "packed, labels"), ("hubert", "mel first, labels"), ("vit", "nchw, labels")]
)
def test_inputs_are_found_that_fit(model_type: str, inputs: str) -> None:
    assert str(build(model_type).variant) == inputs


def test_model_without_its_library_is_reported_as_not_built() -> None:
    with pytest.raises(NotBuiltError):
        build("dinat")  # needs a library that is not installed


def test_a_wrong_gradient_is_different_and_a_rounded_one_is_not() -> None:
    exact = {"loss": torch.ones(1, dtype=torch.float64), "gradient of w": torch.rand(9, dtype=torch.float64)}
    eager = {name: value.float() * (1 + 1e-4) for name, value in exact.items()}
    near = {name: value.float() * (1 - 2e-4) for name, value in exact.items()}
    assert verdict(eager, eager, lambda: exact)[0] == "same"
    assert verdict(near, eager, lambda: exact)[0] == "rounding"
    kind, found = verdict(near | {"gradient of w": -near["gradient of w"]}, eager, lambda: exact)
    assert kind == "different"
    assert "gradient of w" in found


def test_where_eager_itself_chooses_otherwise_in_float64_nothing_is_decided() -> None:
    exact = {"output 0": torch.tensor([1, 2]), "loss": torch.ones(1, dtype=torch.float64)}
    eager = {"output 0": torch.tensor([1, 3]), "loss": torch.ones(1)}
    ours = {"output 0": torch.tensor([4, 2]), "loss": torch.ones(1)}
    assert verdict(ours, eager, lambda: exact)[0] == "undecided"


def test_a_kink_that_rounding_decides_is_told_from_a_wrong_gradient() -> None:
    class Kink(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))
            self.bias = torch.nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.weight - x) + self.bias  # zero at x = 1, where the gradient is 0 or 1

    def step(model: torch.nn.Module, at: float) -> dict[str, torch.Tensor]:
        return training_step(model, lambda **inputs: [model(**inputs)], {"x": torch.tensor([at])})

    model, name = Kink(), "gradient of weight"
    ours = step(model, 1.0) | {name: torch.ones(1)}
    shaken = [step(disturbed(model, seed), 1.0) for seed in range(3)]
    assert as_near_as_rounded_weights(ours, [name], step(model, 1.0), shaken)
    shaken = [step(disturbed(model, seed), 2.0) for seed in range(3)]
    assert not as_near_as_rounded_weights(ours, [name], step(model, 2.0), shaken)
