"""Small models of transformers as ONNX files, by both of torch's exporters, for the tests of OnnxModule."""

from __future__ import annotations

import functools
import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from torch import Tensor, nn

__all__ = ["EXPORTS", "OPTIMIZED", "Exported", "export_model", "run_onnxruntime"]


class Logits(nn.Module):
    """The first output of a model, of inputs by position."""

    def __init__(self, net: nn.Module, **options: Any) -> None:
        super().__init__()
        self.net, self.options = net, options

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.net(*inputs, **self.options)[0]


@dataclass(frozen=True)
class Exported:
    """A file, its source model, and inputs of a batch size."""

    model: onnx.ModelProto
    source: nn.Module
    batch: Callable[[int], tuple[Tensor, ...]]


def _bert() -> tuple[nn.Module, Callable[[int], tuple[Tensor, ...]]]:
    import transformers

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    net = transformers.BertForSequenceClassification(transformers.BertConfig(**sizes, vocab_size=40))

    def batch(rows: int) -> tuple[Tensor, ...]:
        mask = torch.ones(rows, 6, dtype=torch.int64)
        mask[0, 4:] = 0
        # 0 would be padding, whose embedding torch does not train; ONNX knows nothing of that.
        return torch.randint(1, 40, (rows, 6)), mask

    return Logits(net, return_dict=False), batch


def _gpt2() -> tuple[nn.Module, Callable[[int], tuple[Tensor, ...]]]:
    import transformers

    sizes = {"n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 40, "n_positions": 16}
    tokens = {"bos_token_id": 0, "eos_token_id": 1}
    net = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **tokens))
    return Logits(net, return_dict=False, use_cache=False), lambda rows: (torch.randint(0, 40, (rows, 6)),)


def _resnet() -> tuple[nn.Module, Callable[[int], tuple[Tensor, ...]]]:
    import transformers

    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
    net = transformers.ResNetForImageClassification(transformers.ResNetConfig(**sizes, num_labels=4))
    return Logits(net, return_dict=False), lambda rows: (torch.randn(rows, 3, 16, 16),)


def _vit() -> tuple[nn.Module, Callable[[int], tuple[Tensor, ...]]]:
    import transformers

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    net = transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, image_size=16, patch_size=8))
    return Logits(net, return_dict=False), lambda rows: (torch.randn(rows, 3, 16, 16),)


_SOURCES = {"bert": _bert, "gpt2": _gpt2, "resnet": _resnet, "vit": _vit}

EXPORTS = ("bert", "bert-script", "gpt2", "resnet", "resnet-script", "vit", "vit-attention")
"""A model of _SOURCES; "-script" by the exporter by TorchScript, "-attention" of opset 23, which has Attention.

Without the exporters' constant folding, which makes other weights of a model's own: transposed, fused, gathered.
"""

OPTIMIZED = ("bert-optimized", "gpt2-optimized", "resnet-optimized", "vit-optimized")
"""With it."""


@functools.cache
def export_model(name: str) -> Exported:
    """Export one of EXPORTS, in eval mode, with a batch size that is open."""
    kind, _, how = name.partition("-")
    torch.manual_seed(0)
    source, batch = _SOURCES[kind]()
    source.eval()
    for parameter in source.parameters():  # else those of equal values are shared by one of the exporters
        torch.nn.init.normal_(parameter, std=0.2)
    inputs = batch(2)
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if how == "script":
            names = [f"input{index}" for index in range(len(inputs))]
            axes = {one: {0: "batch"} for one in names}
            torch.onnx.export(
                source,
                inputs,
                file,
                dynamo=False,
                input_names=names,
                dynamic_axes=axes,
                opset_version=17,
                training=torch.onnx.TrainingMode.PRESERVE,
                do_constant_folding=False,
            )
            return Exported(onnx.load_from_string(file.getvalue()), source, batch)
        shapes = (tuple({0: torch.export.Dim("batch")} for _ in inputs),)
        program = torch.onnx.export(
            source,
            inputs,
            dynamo=True,
            dynamic_shapes=shapes,
            verbose=False,
            opset_version=23 if how == "attention" else None,
            optimize=how == "optimized",
        )
    assert program is not None
    return Exported(program.model_proto, source, batch)


def run_onnxruntime(model: onnx.ModelProto, inputs: tuple[Tensor, ...]) -> list[np.ndarray[Any, Any]]:
    """Run a model in ONNX Runtime, without its optimizations, some of which hide wrong shapes."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]
    return session.run(None, {name: value.numpy() for name, value in zip(names, inputs, strict=True)})
