"""Resize and Upsample, axis by axis: positions by ONNX's formulas, read by index_select, weighted."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from ort_dynamo.graph.rounded_numbers import floor, round_to
from ort_dynamo.onnx_module.host_values import Setting, integers, numbers
from ort_dynamo.onnx_module.registry import onnx_operator

__all__: list[str] = []

_Mode: TypeAlias = Literal["nearest", "linear", "cubic"]
_Places: TypeAlias = Literal["half_pixel", "pytorch_half_pixel", "half_pixel_symmetric", "align_corners", "asymmetric"]
_Nearest: TypeAlias = Literal["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"]


def _coordinates(mode: str, length: int, out: int, scale: Any, device: torch.device) -> Tensor:
    """Return the position of each new element among the old ones; float32, as ONNX Runtime computes it."""
    place = torch.arange(out, dtype=torch.float32, device=device)
    if mode == "half_pixel":
        return (place + 0.5) / scale - 0.5
    if mode == "pytorch_half_pixel":
        return (place + 0.5) / scale - 0.5 if out > 1 else torch.zeros_like(place)
    if mode == "half_pixel_symmetric":
        offset = length / 2 * (1 - out / (scale * length))
        return offset + (place + 0.5) / scale - 0.5
    if mode == "align_corners":
        return place * ((length - 1) / (out - 1)) if out > 1 else torch.zeros_like(place)
    return place / scale


def _nearest(place: Tensor, mode: str) -> Tensor:
    if mode == "floor":
        return torch.floor(place)
    if mode == "ceil":
        return torch.ceil(place)
    if mode == "round_prefer_floor":
        return torch.ceil(place - 0.5)
    return torch.floor(place + 0.5)


def _cubic_weights(rest: Tensor, a: float) -> list[Tensor]:
    """Weights of the four neighbours, by Keys' kernel; `rest` is the distance to the second one."""
    near = [(a + 2) * t**3 - (a + 3) * t**2 + 1 for t in (rest, 1 - rest)]
    far = [a * t**3 - 5 * a * t**2 + 8 * a * t - 4 * a for t in (rest + 1, 2 - rest)]
    return [far[0], near[0], near[1], far[1]]


def _resize_axis(
    x: Tensor, axis: int, out: int, scale: Any, kind: str, mode: str, nearest: str, a: float, exclude: bool
) -> Tensor:
    length = x.shape[axis]
    place = _coordinates(mode, length, out, scale, x.device)
    if kind == "nearest":
        chosen = torch.clamp(_nearest(place, nearest), 0, length - 1).to(torch.int64)
        return torch.index_select(x, axis, chosen)
    first = torch.floor(place)
    rest = place - first
    if kind == "linear":
        steps, weights = [0, 1], [1 - rest, rest]
    else:
        steps, weights = [-1, 0, 1, 2], _cubic_weights(rest, a)
    neighbours = [first + step for step in steps]
    if exclude:
        inside = [(one >= 0) & (one <= length - 1) for one in neighbours]
        weights = [torch.where(here, weight, 0.0) for here, weight in zip(inside, weights, strict=True)]
        whole = torch.stack(weights).sum(0)
        weights = [weight / whole for weight in weights]
    shape = [1] * x.dim()
    shape[axis] = -1
    terms = [
        torch.index_select(x, axis, torch.clamp(one, 0, length - 1).to(torch.int64))
        * torch.reshape(weight, shape).to(x.dtype)
        for one, weight in zip(neighbours, weights, strict=True)
    ]
    return torch.stack(terms).sum(0)


def _resized_length(length: Any, scale: Any) -> Any:
    """Return the size of a resized axis; ONNX Runtime computes it in float32."""
    return length if scale == 1 else floor(round_to(length * scale, torch.float32), torch.float32)


def _resize(
    x: Tensor,
    scales: list[Any] | None,
    sizes: list[int] | None,
    axes: list[int] | None,
    kind: str,
    mode: str,
    nearest: str,
    a: float = -0.75,
    exclude: bool = False,
) -> Tensor:
    axes = list(range(x.dim())) if axes is None else axes
    if scales is not None:
        targets = [(_resized_length(x.shape[axis], scale), scale) for axis, scale in zip(axes, scales, strict=True)]
    elif sizes is not None:
        targets = [(size, size / x.shape[axis]) for axis, size in zip(axes, sizes, strict=True)]
    else:
        raise ValueError("Resize takes scales or sizes")
    kept = x.dtype
    if kind != "nearest" and not x.is_floating_point():
        x = x.to(torch.float32)
    for axis, (out, scale) in zip(axes, targets, strict=True):
        if scale != 1:
            x = _resize_axis(x, axis, out, scale, kind, mode, nearest, a, exclude)
    return x.to(kept)


@onnx_operator("Upsample", 7)
def upsample_by_attribute(x: Tensor, *, mode: Literal["nearest", "linear"] = "nearest", scales: list[float]) -> Tensor:
    """By factors, at positions that are divided by them."""
    return _resize(x, list(scales), None, None, mode, "asymmetric", "floor")


@onnx_operator("Resize", 10)
@onnx_operator("Upsample", 9)
def upsample(x: Tensor, scales: Setting, *, mode: Literal["nearest", "linear"] = "nearest") -> Tensor:
    """By factors, at positions that are divided by them."""
    return _resize(x, numbers(scales), None, None, mode, "asymmetric", "floor")


@onnx_operator("Resize", 11)
def resize(
    x: Tensor,
    roi: Setting | None = None,
    scales: Setting | None = None,
    sizes: Setting | None = None,
    *,
    antialias: Literal[0] = 0,
    axes: list[int] | None = None,
    coordinate_transformation_mode: _Places = "half_pixel",
    cubic_coeff_a: float = -0.75,
    exclude_outside: int = 0,
    extrapolation_value: float = 0.0,
    keep_aspect_ratio_policy: Literal["stretch"] = "stretch",
    mode: _Mode = "nearest",
    nearest_mode: _Nearest = "round_prefer_floor",
) -> Tensor:
    """To sizes, or by factors; without antialiasing, regions of interest and kept aspect ratios."""
    factors = None if scales is None else numbers(scales)
    lengths = None if sizes is None else integers(sizes)
    return _resize(
        x,
        factors or None,
        None if factors else lengths,
        axes,
        mode,
        coordinate_transformation_mode,
        nearest_mode,
        cubic_coeff_a,
        bool(exclude_outside),
    )
