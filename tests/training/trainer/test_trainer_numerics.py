"""Sections 2.5 and 2.6 of ORTTrainer's reference: the results of a step, against the formulas in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from small_trainers import Mlp, PlainLoop, assert_same_weights, batches, classify, losses, make_trainer, weights
from torch import Tensor, nn

from ort_dynamo import amp, optim
from ort_dynamo.testing import TOLERANCES, assert_close

AFTER = optim.AdamConfig.DecayMode.AFTER_WEIGHT_UPDATE
GROUPS = [{"params": ["fc1.weight", "fc2.bias"], "lambda_coef": 0.3, "alpha": 0.7}]
CONFIGS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: optim.SGDConfig(lr=0.3),
    "adam": lambda: optim.AdamConfig(lr=0.01, lambda_coef=0.1),
    "adam without decay": lambda: optim.AdamConfig(lr=0.01, epsilon=1e-3),
    "adam without correction": lambda: optim.AdamConfig(lr=0.01, do_bias_correction=False, lambda_coef=0.1),
    "adam that decays after": lambda: optim.AdamConfig(lr=0.01, lambda_coef=0.1, weight_decay_mode=AFTER),
    "adam that decays after, without correction": lambda: optim.AdamConfig(
        lr=0.01, lambda_coef=0.1, weight_decay_mode=AFTER, do_bias_correction=False
    ),
    "adam with a group": lambda: optim.AdamConfig(GROUPS, lr=0.01),
    "adam with norms by group": lambda: optim.AdamConfig(
        [{"params": ["fc1.weight"], "max_norm_clip": 0.01}], lr=0.01, max_norm_clip=0.2, epsilon=1e-2
    ),
    "lamb": lambda: optim.LambConfig(lr=0.01, lambda_coef=0.1),
    "lamb with correction": lambda: optim.LambConfig(lr=0.01, do_bias_correction=True),
    "lamb with limits": lambda: optim.LambConfig(lr=0.01, ratio_min=0.3, ratio_max=0.5),
    "lamb with a group": lambda: optim.LambConfig(
        [{"params": ["fc1.weight"], "ratio_max": 0.1, "lambda_coef": 0.5}], lr=0.01, max_norm_clip=0.1
    ),
}
SAMPLE = ("sgd", "adam with norms by group", "adam that decays after", "lamb with a group")
FORMS = pytest.mark.parametrize("one_session", [True, False], ids=["one session", "two halves"])


@FORMS
@pytest.mark.parametrize("name", [pytest.param(one, marks=[pytest.mark.slow] * (one not in SAMPLE)) for one in CONFIGS])
def test_an_update_agrees_with_the_formula(name: str, one_session: bool) -> None:
    config = CONFIGS[name]()
    trainer = make_trainer(config, one_session=one_session)
    plain = PlainLoop(trainer._torch_model, config)  # type: ignore[arg-type]
    data = batches(4)
    found = losses(trainer, data)
    expected = [plain.step(*batch) for batch in data]
    assert trainer._running is not None
    assert trainer._running.in_one_session == one_session
    np.testing.assert_allclose(found, expected, rtol=2e-5)
    assert_same_weights(trainer, plain.weights, name)
    optimizer = trainer.state_dict()["optimizer"]
    if isinstance(config, optim.SGDConfig):
        assert optimizer == {}
        return
    for weight, moments in plain.moments.items():
        for key, moment in zip(("Moment_1", "Moment_2"), moments, strict=True):
            own = torch.from_numpy(optimizer[weight][key])
            assert_close(own, torch.from_numpy(moment).float(), f"{weight} {key}", strides=False)


@FORMS
@pytest.mark.parametrize("clips", [True, False])
@pytest.mark.parametrize("make", [optim.AdamConfig, pytest.param(optim.LambConfig, marks=pytest.mark.slow)])
def test_gradients_are_clipped_over_all_weights_where_asked_to(make: Any, clips: bool, one_session: bool) -> None:
    # So great an epsilon makes the step depend on the gradients' size, not on their direction alone.
    config = make(lr=0.5, max_norm_clip=0.05, epsilon=1.0)
    trainer = make_trainer(config, one_session=one_session, utils={"grad_norm_clip": clips})
    plain, other = (PlainLoop(trainer._torch_model, config, clips=one) for one in (clips, not clips))  # type: ignore[arg-type]
    for batch in batches(3):
        trainer.train_step(*batch)
        plain.step(*batch)
        other.step(*batch)
    assert_same_weights(trainer, plain.weights)
    name = "fc2.weight"
    assert np.abs(plain.weights[name] - other.weights[name]).max() > 1e-3


@FORMS
@pytest.mark.parametrize("first", [1, 2])
def test_the_number_of_gathered_steps_and_clipping_may_change(first: int, one_session: bool) -> None:
    config = optim.AdamConfig(lr=0.5, max_norm_clip=0.05, epsilon=1.0)
    trainer = make_trainer(config, one_session=one_session, batch={"gradient_accumulation_steps": first})
    plain = PlainLoop(trainer._torch_model, config, gathers=first)  # type: ignore[arg-type]
    updates = []
    for step, batch in enumerate(batches(10), 1):
        trainer.train_step(*batch)
        plain.step(*batch)
        assert_same_weights(trainer, plain.weights, f"step {step}")
        updates.append(trainer._train_step_info.optimization_step)
        if step == 2:
            plain._gathers = trainer.options.batch.gradient_accumulation_steps = 3 - first
            plain._clips = trainer.options.utils.grad_norm_clip = False
        elif step == 5:
            trainer.options.batch.gradient_accumulation_steps = 3
        if step == (6 if first == 1 else 5):  # after 5 steps, an accumulation of 2 runs, and ends first
            plain._gathers = 3
    assert updates == ([1, 2, 2, 3, 3, 4, 4, 4, 5, 5] if first == 1 else [0, 1, 2, 3, 4, 5, 5, 5, 6, 6])


def test_sgd_is_not_clipped() -> None:
    config = optim.SGDConfig(lr=10.0)
    trainer = make_trainer(config)
    plain = PlainLoop(trainer._torch_model, config, clips=False)  # type: ignore[arg-type]
    for batch in batches(3):
        trainer.train_step(*batch)
        plain.step(*batch)
    assert_same_weights(trainer, plain.weights)


@FORMS
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(optim.SGDConfig, marks=pytest.mark.slow),
        optim.AdamConfig,
        pytest.param(optim.LambConfig, marks=pytest.mark.slow),
    ],
)
def test_gathered_gradients_make_one_update_by_their_mean(make: Any, one_session: bool) -> None:
    config = make(lr=0.01)
    trainer = make_trainer(config, one_session=one_session, batch={"gradient_accumulation_steps": 3})
    plain = PlainLoop(trainer._torch_model, config, gathers=3)  # type: ignore[arg-type]
    for batch in batches(7):
        found = trainer.train_step(*batch)[0].item()
        assert found == pytest.approx(plain.step(*batch), rel=2e-5)
        assert_same_weights(trainer, plain.weights)
    assert trainer._train_step_info.optimization_step == 2


@FORMS
def test_a_loss_scale_changes_only_rounding(one_session: bool) -> None:
    # The scale goes through the step of a float32 model, whose mixed precision only rounds the outputs.
    config = optim.AdamConfig(lr=0.01, max_norm_clip=0.1)
    levels = {"mixed_precision": {"enabled": True, "loss_scaler": amp.DynamicLossScaler(loss_scale=2.0**10)}}
    trainer = make_trainer(config, one_session=one_session, **levels)
    plain = PlainLoop(trainer._torch_model, config)  # type: ignore[arg-type]
    for batch in batches(4):
        found = trainer.train_step(*batch)[0].item()
        assert found == pytest.approx(plain.step(*batch), rel=4e-3)
    assert_same_weights(trainer, plain.weights, tolerance=TOLERANCES[torch.float16])


@pytest.mark.parametrize(
    ("name", "levels"),
    [
        ("adam with a group", {"batch": {"gradient_accumulation_steps": 2}}),
        *(
            pytest.param(name, levels, marks=pytest.mark.slow)
            for name in ("sgd", "adam with a group", "lamb with a group", "adam that decays after")
            for levels in ({}, {"utils": {"grad_norm_clip": False}})
        ),
    ],
)
def test_both_forms_of_a_step_agree(name: str, levels: dict[str, Any]) -> None:
    trainers = [make_trainer(CONFIGS[name](), one_session=one, **levels) for one in (True, False)]
    data = batches(5)
    found = [losses(trainer, data) for trainer in trainers]
    np.testing.assert_allclose(*found, rtol=2e-5)
    assert_same_weights(trainers[0], weights(trainers[1]))


# -- networks ----------------------------------------------------------------------------------------------------------


def language_model(kind: str, dropout: float = 0.0) -> nn.Module:
    """A transformer of one layer that gives its loss first."""
    import transformers

    torch.manual_seed(2)
    if kind == "bert":
        sizes = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        drops = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
        config = transformers.BertConfig(**sizes, **drops, intermediate_size=32, max_position_embeddings=16)
        return transformers.BertForMaskedLM(config).train()
    drops = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    gpt = transformers.GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2, n_positions=16, **drops)
    return transformers.GPT2LMHeadModel(gpt).train()


TOKENS: dict[str, Any] = {
    "inputs": [("input_ids", ["batch", 8]), ("attention_mask", ["batch", 8]), ("labels", ["batch", 8])],
    "outputs": [("loss", [], True), ("logits", ["batch", 8, 40])],
}


def texts(count: int) -> list[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(3)
    mask = torch.ones(3, 8, dtype=torch.int64)
    mask[0, 6:] = 0
    return [(torch.randint(0, 40, (3, 8), generator=generator), mask) for _ in range(count)]


class ByKeyword(nn.Module):
    """Calls a transformer as TOKENS has its inputs."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Any:
        return self.inner(input_ids=input_ids, attention_mask=attention_mask, labels=labels)


@pytest.mark.parametrize(
    ("kind", "one_session"),
    [
        ("bert", True),
        pytest.param("bert", False, marks=pytest.mark.slow),
        pytest.param("gpt", True, marks=pytest.mark.slow),
        pytest.param("gpt", False, marks=pytest.mark.slow),
    ],
)
def test_a_transformer_learns_like_a_plain_loop(kind: str, one_session: bool) -> None:
    model = ByKeyword(language_model(kind))
    config = optim.AdamConfig(lr=0.005, lambda_coef=0.01)
    trainer = make_trainer(config, model, desc=TOKENS, loss_fn=None, one_session=one_session)
    plain = PlainLoop(model, config, None, dtype=torch.float32)
    data = [(tokens, mask, tokens) for tokens, mask in texts(2)] * 3
    found, expected = losses(trainer, data), [plain.step(*batch) for batch in data]
    np.testing.assert_allclose(found, expected, rtol=2e-4)
    assert found[-1] < found[0]


class ResNet(nn.Module):
    """One block with a shortcut, batch normalizations, and a pool."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.conv1 = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 3)

    def forward(self, images: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.conv(images)))
        x = torch.relu(x + self.norm1(self.conv1(x)))
        return self.fc(x.mean((2, 3)))


IMAGES: dict[str, Any] = {
    "inputs": [("images", ["batch", 3, 8, 8]), ("label", ["batch"])],
    "outputs": [("loss", [], True), ("predictions", ["batch", 3])],
}


def images(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(4)
    return [
        (torch.randn(4, 3, 8, 8, generator=generator), torch.randint(0, 3, (4,), generator=generator))
        for _ in range(count)
    ]


@pytest.mark.parametrize(
    ("frozen", "one_session"),
    [
        (["norm.weight", "conv1.weight"], True),
        pytest.param([], True, marks=pytest.mark.slow),
        pytest.param([], False, marks=pytest.mark.slow),
        pytest.param(["norm.weight", "conv1.weight"], False, marks=pytest.mark.slow),
    ],
)
def test_a_residual_network_learns_and_its_statistics_move(frozen: list[str], one_session: bool) -> None:
    torch.manual_seed(5)
    model = ResNet()
    config = optim.SGDConfig(lr=0.1)
    trainer = make_trainer(config, model, desc=IMAGES, one_session=one_session, utils={"frozen_weights": frozen})
    plain = PlainLoop(model.train(), config)
    for name in frozen:
        plain._trained[name].requires_grad_(False)
        del plain._trained[name], plain.weights[name]
    data = images(5)
    found, expected = losses(trainer, data), [plain.step(*batch) for batch in data]
    np.testing.assert_allclose(found, expected, rtol=2e-5)
    expected_state = {name: one.double().numpy() for name, one in plain.model.state_dict().items()}
    counts = {name: expected_state.pop(name) for name in list(expected_state) if name.endswith("num_batches_tracked")}
    assert_same_weights(trainer, expected_state)
    assert counts.keys() == {"norm.num_batches_tracked", "norm1.num_batches_tracked"}
    for name, count in counts.items():
        assert weights(trainer)[name] == count == 5


@FORMS
def test_float16_learns_with_the_dynamic_scaler(one_session: bool) -> None:
    config = optim.AdamConfig(lr=0.01)
    trainer = make_trainer(config, one_session=one_session, mixed_precision={"enabled": True})
    plain = PlainLoop(trainer._torch_model, config)  # type: ignore[arg-type]
    data = batches(2) * 4
    found, expected = losses(trainer, data), [plain.step(*batch) for batch in data]
    np.testing.assert_allclose(found, expected, rtol=2e-2)
    assert trainer.options.mixed_precision.loss_scaler.loss_scale == 2.0**16
    assert {one.dtype for one in weights(trainer).values()} == {np.dtype(np.float32)}


@pytest.mark.parametrize(
    ("dtype", "one_session"),
    [
        (torch.bfloat16, True),
        (torch.bfloat16, False),
        pytest.param(torch.float16, True, marks=pytest.mark.slow),
        pytest.param(torch.float16, False, marks=pytest.mark.slow),
    ],
)
def test_a_narrow_model_has_masters_in_float32(dtype: torch.dtype, one_session: bool) -> None:
    torch.manual_seed(1)
    model = Mlp().to(dtype)
    # Steps so small that weights of this dtype alone would never move.
    config = optim.SGDConfig(lr=1e-4)
    trainer = make_trainer(config, model, loss_fn=_widened, one_session=one_session)
    plain = PlainLoop(model, config, dtype=torch.float32)
    for x, label in batches(1) * 6:
        found = trainer.train_step(x.to(dtype), label)[0].item()
        assert found == pytest.approx(plain.step(x, label), rel=3e-2)
    moved = {name: plain.weights[name] - one.float().detach().numpy() for name, one in model.named_parameters()}
    for name, one in model.named_parameters():
        own = weights(trainer)[name]
        assert own.dtype == np.float32
        change = torch.from_numpy(own - one.float().detach().numpy())
        assert_close(change, torch.from_numpy(moved[name]).float(), name, TOLERANCES[torch.bfloat16], strides=False)
        assert float(change.abs().max()) > 0
    parameter = trainer._running.combined.model.fc1.weight  # type: ignore[union-attr]
    assert parameter.dtype is dtype
    assert torch.equal(parameter, torch.from_numpy(weights(trainer)["fc1.weight"]).to(dtype))


def _widened(prediction: Tensor, label: Tensor) -> Tensor:
    return classify(prediction.float(), label)
