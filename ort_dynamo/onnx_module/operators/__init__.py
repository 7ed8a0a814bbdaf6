"""The operators of ONNX as functions on tensors, by families; importing this registers them."""

from __future__ import annotations

from ort_dynamo.onnx_module.operators import (
    activation,
    convolution,
    creation,
    dropout,
    gather,
    loss,
    matmul,
    normalization,
    padding,
    pointwise,
    pooling,
    reduction,
    resize,
    scatter,
    sequence,
    shape,
    views,
)

__all__ = [
    "activation",
    "convolution",
    "creation",
    "dropout",
    "gather",
    "loss",
    "matmul",
    "normalization",
    "padding",
    "pointwise",
    "pooling",
    "reduction",
    "resize",
    "scatter",
    "sequence",
    "shape",
    "views",
]
