"""Architectures of many kinds, tiny and untrained: a training step's loss and gradients against eager."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn
from torch._dynamo.utils import counters

from ort_dynamo.testing import Tolerance, assert_close, eager_reasons

pytestmark = pytest.mark.filterwarnings("ignore")  # the models warn about themselves

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
TEXT = {"vocab_size": 99, **SMALL}
HALVES = {
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
}

Made = tuple[nn.Module, dict[str, Any]]


def tokens() -> torch.Tensor:
    return torch.randint(3, 99, (2, 12))


def image(size: int = 32) -> torch.Tensor:
    return torch.randn(2, 3, size, size)


def classes() -> torch.Tensor:
    return torch.tensor([1, 3])


def language_model(name: str, lm: str = "ForCausalLM", **options: Any) -> Callable[[], Made]:
    def make() -> Made:
        config = getattr(hf, f"{name}Config")(**options)
        config.use_cache = False
        ids = tokens()
        return getattr(hf, f"{name}{lm}")(config), {"input_ids": ids, "labels": ids.clone()}

    return make


class DiffusionBlock(nn.Module):
    """A U-Net of one level: group norm, SiLU, time embedding, dropout, attention, two resizes, skip connection."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.Conv2d(width, 2 * width, 3, 2, 1)
        self.norms = nn.ModuleList(nn.GroupNorm(4, 2 * width) for _ in range(3))
        self.inner = nn.Conv2d(2 * width, 2 * width, 3, padding=1)
        self.time = nn.Linear(16, 2 * width)
        self.qkv = nn.Conv2d(2 * width, 6 * width, 1)
        self.project = nn.Conv2d(2 * width, 2 * width, 1)
        self.up = nn.Conv2d(2 * width, width, 3, padding=1)
        self.leave = nn.Conv2d(2 * width, 3, 3, padding=1)

    def forward(self, x: torch.Tensor, time: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        angles = time[:, None].float() * torch.exp(torch.arange(8) * -0.5)
        embedding = self.time(F.silu(torch.cat([angles.sin(), angles.cos()], -1)))[:, :, None, None]
        skip = self.enter(x)
        h = self.down(skip)
        h = h + self.inner(F.dropout(F.silu(self.norms[0](h)), 0.1, self.training)) + embedding
        batch, channels = h.shape[:2]
        q, k, v = self.qkv(self.norms[1](h)).view(batch, 3, 2, channels // 2, -1).transpose(-1, -2).unbind(1)
        h = h + self.project(F.scaled_dot_product_attention(q, k, v).transpose(-1, -2).reshape(h.shape))
        h = self.up(F.interpolate(h, scale_factor=2.0, mode="nearest"))
        h = torch.cat([h, F.interpolate(skip, size=h.shape[2:], mode="bilinear")], 1)
        return F.mse_loss(self.leave(F.silu(self.norms[2](h))), target)


def unet() -> Made:
    return DiffusionBlock(), {"x": image(16), "time": torch.tensor([3, 7]), "target": image(16)}


def convnext() -> Made:
    config = hf.ConvNextConfig(hidden_sizes=[8, 16], depths=[1, 2], num_stages=2, num_labels=5)
    return hf.ConvNextForImageClassification(config), {"pixel_values": image(), "labels": classes()}


def swin() -> Made:
    config = hf.SwinConfig(
        image_size=32, patch_size=4, embed_dim=16, depths=[1, 2], num_heads=[2, 4], window_size=4, num_labels=5
    )
    return hf.SwinForImageClassification(config), {"pixel_values": image(), "labels": classes()}


def segformer() -> Made:
    config = hf.SegformerConfig(
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[8, 16],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=16,
        num_labels=5,
    )
    labels = torch.randint(0, 5, (2, 32, 32))
    return hf.SegformerForSemanticSegmentation(config), {"pixel_values": image(), "labels": labels}


def dinov2() -> Made:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = hf.Dinov2Config(image_size=28, patch_size=7, num_labels=5, **sizes)
    # Images of another size than the position embedding's, which is resized.
    return hf.Dinov2ForImageClassification(config), {"pixel_values": image(35), "labels": classes()}


def vit_mae() -> Made:
    config = hf.ViTMAEConfig(
        image_size=32,
        patch_size=8,
        decoder_num_attention_heads=2,
        decoder_hidden_size=16,
        decoder_num_hidden_layers=1,
        decoder_intermediate_size=32,
        **SMALL,
    )
    return hf.ViTMAEForPreTraining(config), {"pixel_values": image(), "noise": torch.rand(2, 16)}


def clip() -> Made:
    text = {"vocab_size": 99, "max_position_embeddings": 16, "eos_token_id": 2, **SMALL}
    config = hf.CLIPConfig(
        text_config=text, vision_config={"image_size": 32, "patch_size": 8, **SMALL}, projection_dim=16
    )
    return hf.CLIPModel(config), {"input_ids": tokens(), "pixel_values": image(), "return_loss": True}


def whisper() -> Made:
    config = hf.WhisperConfig(
        vocab_size=99,
        num_mel_bins=8,
        d_model=32,
        max_source_positions=20,
        max_target_positions=20,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        use_cache=False,
        **HALVES,
    )
    return hf.WhisperForConditionalGeneration(config), {"input_features": torch.randn(2, 8, 40), "labels": tokens()}


def wav2vec2() -> Made:
    config = hf.Wav2Vec2Config(
        conv_dim=[8, 8],
        conv_kernel=[10, 3],
        conv_stride=[5, 2],
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2,
        classifier_proj_size=16,
        num_labels=3,
        layerdrop=0.0,
        apply_spec_augment=False,
        **TEXT,
    )
    labels = torch.tensor([0, 2])
    return hf.Wav2Vec2ForSequenceClassification(config), {"input_values": torch.randn(2, 400), "labels": labels}


def t5() -> Made:
    config = hf.T5Config(
        vocab_size=99, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, decoder_start_token_id=0, use_cache=False
    )
    return hf.T5ForConditionalGeneration(config), {"input_ids": tokens(), "labels": tokens()}


def bart() -> Made:
    config = hf.BartConfig(vocab_size=99, d_model=32, max_position_embeddings=32, use_cache=False, **HALVES)
    return hf.BartForConditionalGeneration(config), {"input_ids": tokens(), "labels": tokens()}


def deberta() -> Made:
    config = hf.DebertaV2Config(
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        position_buckets=8,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        max_position_embeddings=32,
        type_vocab_size=0,
        **TEXT,
    )
    return hf.DebertaV2ForMaskedLM(config), {"input_ids": tokens(), "labels": tokens()}


def electra() -> Made:
    config = hf.ElectraConfig(embedding_size=16, **TEXT)
    return hf.ElectraForPreTraining(config), {"input_ids": tokens(), "labels": torch.randint(0, 2, (2, 12))}


def qwen3_next() -> Made:
    """A layer of the gated delta rule, which solves triangular systems, and one of attention, both with experts."""
    sizes = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "head_dim": 8}
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    }
    return language_model(
        "Qwen3Next",
        num_key_value_heads=2,
        linear_num_value_heads=4,
        layer_types=["linear_attention", "full_attention"],
        **sizes,
        **experts,
        **TEXT,
    )()


FAST: dict[str, Callable[[], Made]] = {
    "unet": unet,
    "convnext": convnext,
    "segformer": segformer,
    "whisper": whisper,
    "mixtral": language_model("Mixtral", num_key_value_heads=2, num_local_experts=4, **TEXT),
}
SLOW: dict[str, Callable[[], Made]] = {
    "electra": electra,
    "swin": swin,
    "dinov2": dinov2,
    "vit_mae": vit_mae,
    "clip": clip,
    "wav2vec2": wav2vec2,
    "t5": t5,
    "bart": bart,
    "deberta": deberta,
    "mamba": language_model("Mamba", vocab_size=99, hidden_size=16, num_hidden_layers=1, state_size=4),
    "falcon": language_model("Falcon", vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4),
    "mistral": language_model("Mistral", num_key_value_heads=2, sliding_window=4, **TEXT),
    "qwen2": language_model("Qwen2", num_key_value_heads=2, **TEXT),
    "gemma2": language_model(
        "Gemma2", num_key_value_heads=2, head_dim=8, query_pre_attn_scalar=8, sliding_window=4, **TEXT
    ),
    "qwen3_next": qwen3_next,
    # Dropout of an expanded position embedding.
    "xlnet": language_model("XLNet", lm="LMHeadModel", vocab_size=99, d_model=32, n_layer=2, n_head=4, d_inner=64),
    "bloom": language_model("Bloom", vocab_size=99, hidden_size=32, n_layer=2, n_head=4),
}


@pytest.mark.parametrize(
    "make",
    [*FAST.values(), *(pytest.param(make, marks=pytest.mark.slow) for make in SLOW.values())],
    ids=[*FAST, *SLOW],
)
def test_a_training_step_equals_eager(make: Callable[[], Made]) -> None:
    theirs, inputs = make()
    theirs.train()
    ours = copy.deepcopy(theirs)
    losses = []
    for model, backend in ((theirs, None), (ours, "ort_train")):
        torch.manual_seed(1)
        random.seed(1)
        run = model if backend is None else torch.compile(model, backend=backend)
        output = run(**inputs)
        loss = output if isinstance(output, torch.Tensor) else output.loss
        loss.backward()
        losses.append(loss.detach())
    assert_close(losses[1], losses[0], "the loss", Tolerance(1e-4, 0.0))
    expected = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    # Gradients that are zero but for rounding (a key's bias) have nothing to compare with.
    floor = max(gradient.abs().max().item() for gradient in expected.values()) * 1e-5
    for name, parameter in ours.named_parameters():
        if name in expected:
            assert_close(parameter.grad, expected[name], f"gradient of {name}", Tolerance(1e-4, floor), strides=False)
    assert counters["ort_train"]["native_nodes"] + counters["ort_train"]["chosen_nodes"] > 0
    assert not eager_reasons()
