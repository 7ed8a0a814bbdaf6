"""Ingredients that are layers: convolutions, norms, pools, resizing, linear layers, attention."""

from __future__ import annotations

from typing import Any

from program_draft import Draft, call, ingredient
from torch import Tensor

CHANNELS = (3, 4, 6, 8)
"""Few, so that values of one shape are found for sums."""


@ingredient(14, 3, 4, 5)
def convolution(draft: Draft, a: str, value: Tensor) -> str:
    channels, dims = value.shape[1], value.dim() - 2
    to = draft.pick((channels, channels, *CHANNELS))
    given: dict[str, Any] = {}
    kernel = draft.pick((3, 3, 3, 1, 1, 2))
    if kernel == 3:
        given["padding"] = draft.pick((1, 1, 1, 0, 2))
        if draft.chance(0.15):
            given["dilation"] = 2
            given["padding"] = 2
    if draft.chance(0.2) and value.shape[-1] > 1:
        # oneDNN reads uninitialized memory for the bfloat16 weight gradient where images are one pixel wide.
        given["stride"] = 2
    if draft.chance(0.15):
        given["groups"] = channels  # depthwise
        to = channels * draft.pick((1, 1, 2))
    elif draft.chance(0.15) and channels % 2 == 0 and to % 2 == 0:
        given["groups"] = 2
    if draft.chance(0.25):
        given["bias"] = False
    if draft.chance(0.06) and given.get("padding"):
        given["padding_mode"] = draft.pick(("reflect", "circular", "replicate"))
    return f"{draft.part(call(f'nn.Conv{dims}d', channels, to, kernel, **given))}({a})"


@ingredient(3, 3, 4, 5)
def transposed_convolution(draft: Draft, a: str, value: Tensor) -> str:
    channels, dims = value.shape[1], value.dim() - 2
    kernel, stride, padding, output_padding = draft.pick(
        ((4, 2, 1, 0), (2, 2, 0, 0), (3, 1, 1, 0), (3, 2, 1, 1), (1, 1, 0, 0), (3, 2, 0, 0))
    )
    to = draft.pick((channels, *CHANNELS))
    given: dict[str, Any] = {"stride": stride, "padding": padding, "output_padding": output_padding}
    if draft.chance(0.2) and channels % 2 == 0 and to % 2 == 0:
        given["groups"] = 2
    if draft.chance(0.25):
        given["bias"] = False
    return f"{draft.part(call(f'nn.ConvTranspose{dims}d', channels, to, kernel, **given))}({a})"


@ingredient(6, 2, 3, 4, 5)
def batch_norm(draft: Draft, a: str, value: Tensor) -> str:
    given = draft.pick(({}, {}, {}, {"affine": False}, {"track_running_stats": False}, {"momentum": 0.5}))
    dims = max(value.dim() - 2, 1)
    return f"{draft.part(call(f'nn.BatchNorm{dims}d', value.shape[1], **given))}({a})"


@ingredient(3, 2, 3, 4, 5)
def group_norm(draft: Draft, a: str, value: Tensor) -> str:
    groups = draft.pick([g for g in (1, 2, 3, 4) if value.shape[1] % g == 0])
    if not value.requires_grad and not value.is_contiguous():
        # torch's backward crashes where it has gradients of weights only, for channels_last.
        return f"F.group_norm({a}, {groups})"
    return f"{draft.part(call('nn.GroupNorm', groups, value.shape[1]))}({a})"


@ingredient(2, 3, 4, 5)
def instance_norm(draft: Draft, a: str, value: Tensor) -> str:
    given = draft.pick(({}, {"affine": True}, {"affine": True, "track_running_stats": True}))
    return f"{draft.part(call(f'nn.InstanceNorm{value.dim() - 2}d', value.shape[1], **given))}({a})"


@ingredient(3, 2, 3, 4)
def layer_norm(draft: Draft, a: str, value: Tensor) -> str:
    if value.dim() == 4 and draft.chance(0.5):  # of the channels
        norm = draft.part(call("nn.LayerNorm", value.shape[1]))
        return f"{norm}({a}.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)"
    dims = draft.pick(range(1, value.dim()))
    return f"{draft.part(call('nn.LayerNorm', list(value.shape[-dims:])))}({a})"


@ingredient(4, 3, 4, 5)
def pool(draft: Draft, a: str, value: Tensor) -> str:
    dims = value.dim() - 2
    return draft.pick(
        (
            f"F.max_pool{dims}d({a}, 2)",
            f"F.max_pool{dims}d({a}, 3, stride=2, padding=1)",
            f"F.max_pool{dims}d({a}, 2, stride=1, ceil_mode=True)",
            f"F.avg_pool{dims}d({a}, 2)",
            f"F.avg_pool{dims}d({a}, 3, stride=1, padding=1)",
            f"F.avg_pool{dims}d({a}, 3, stride=2, padding=1, count_include_pad=False)",
            f"F.adaptive_avg_pool{dims}d({a}, {draft.pick((1, 1, 2, 3))})",
            f"F.adaptive_max_pool{dims}d({a}, {draft.pick((1, 2))})",
        )
    )


@ingredient(2, 3, 4, 5)
def resize(draft: Draft, a: str, value: Tensor) -> str:
    linear = {3: "linear", 4: "bilinear", 5: "trilinear"}[value.dim()]
    forms = [
        f"F.interpolate({a}, scale_factor=2)",
        f"F.interpolate({a}, scale_factor=2, mode={linear!r})",
        f"F.interpolate({a}, scale_factor=2, mode={linear!r}, align_corners=True)",
        f"F.interpolate({a}, size={tuple(size + 1 for size in value.shape[2:])})",
    ]
    if value.dim() == 4:
        forms += [f"F.interpolate({a}, scale_factor=2, mode='bicubic')"]
    if value.dim() == 4 and value.numel():  # torch's kernel and its meta function differ on nothing
        forms += [f"F.pixel_unshuffle({a}, 2)"]
        forms += [f"F.pixel_shuffle({a}, 2)"] if value.shape[1] % 4 == 0 else []
    return draft.pick(forms)


@ingredient(1.5, 3, 4, 5)
def pad(draft: Draft, a: str, value: Tensor) -> str:
    sides = ", ".join(["1"] * 2 * (value.dim() - 2))
    mode = draft.pick(("constant", "reflect", "replicate", "circular"))
    if mode == "constant" and draft.chance(0.5):
        return f"F.pad({a}, (0, 1, 1, 0), value=0.5)"
    return f"F.pad({a}, ({sides}), mode={mode!r})"


@ingredient(4, 2, 3, 4)
def linear(draft: Draft, a: str, value: Tensor) -> str:
    width = value.shape[-1]
    layer = draft.part(call("nn.Linear", width, draft.pick((width, 4, 8, 10)), bias=draft.chance(0.75)))
    return f"{layer}({a})"


@ingredient(5, 2)
def decoder(draft: Draft, a: str, value: Tensor) -> str:
    """An image of a vector, of the shape of another where there is one, so that their layouts meet."""
    like = draft.other(a, lambda value: value.dim() == 4)
    channels, height, width = draft.values[like].shape[1:] if like else (draft.pick(CHANNELS), 4, 4)
    layer = draft.part(call("nn.Linear", value.shape[1], channels * height * width))
    image = f"{layer}({a}).view(-1, {channels}, {height}, {width})"
    if like and draft.values[like].shape[0] == value.shape[0] and draft.chance(0.5):
        return f"{like} + {image}"
    return image


@ingredient(3, 4)
def channel_gate(draft: Draft, a: str, value: Tensor) -> str:
    channels = value.shape[1]
    gate = f"{a}.mean((2, 3), keepdim=True)"
    if draft.chance(0.6):
        gate = f"{draft.part(call('nn.Conv2d', channels, channels, 1))}({gate})"
    gate = f"{draft.pick(('torch.sigmoid', 'F.hardsigmoid', 'torch.tanh'))}({gate})"
    return draft.pick((f"{a} * {gate}", f"{gate} * {a}", f"{a} + {gate}"))


@ingredient(2, 2, 3, 4, 5)
def parameter_term(draft: Draft, a: str, value: Tensor) -> str:
    shape = draft.pick(((1, *value.shape[1:]), value.shape[1:], (value.shape[1], *[1] * (value.dim() - 2)), (1,)))
    term = draft.part(f"nn.Parameter(torch.randn({', '.join(str(size) for size in shape)}))")
    return draft.pick((f"{a} + {term}", f"{term} + {a}", f"{a} * {term}", f"{term} * {a}", f"{term} - {a}"))


@ingredient(2, 3, 4)
def attention(draft: Draft, a: str, value: Tensor) -> str:
    causal = ", is_causal=True" if draft.chance(0.3) else ""
    key = draft.alike(a, value.shape) or a
    return f"F.scaled_dot_product_attention({a}, {key}, {draft.pick((a, key))}{causal})"


@ingredient(1.5, 2, 3, 4)
def product(draft: Draft, a: str, value: Tensor) -> str:
    other = draft.alike(a, value.shape) or a
    return draft.pick((f"{a} @ {other}.mT / 4", f"{a}.mT @ {other} / 4"))


@ingredient(2)
def dropout(draft: Draft, a: str, value: Tensor) -> str:
    if value.dim() > 2 and draft.chance(0.3):
        return f"F.dropout{min(value.dim() - 2, 3)}d({a}, 0.3, self.training)"
    return f"F.dropout({a}, {draft.pick((0.1, 0.5))}, self.training)"


@ingredient(1, 2, 3)
def prelu_of_channels(draft: Draft, a: str, value: Tensor) -> str:
    return f"{draft.part(call('nn.PReLU', value.shape[1]))}({a})"
