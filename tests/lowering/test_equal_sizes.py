"""Sizes that a guard makes equal have one name in the ONNX graph."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ort_dynamo.testing import assert_close

VOCABULARY = 5


def batch(*sizes: int) -> tuple[Tensor, Tensor]:
    """Return logits and labels, none of whose sizes is a constant but the number of classes."""
    logits = torch.randn(*sizes, VOCABULARY, requires_grad=True)
    labels = torch.randint(VOCABULARY, sizes)
    for axis in range(len(sizes)):
        torch._dynamo.mark_dynamic(logits, axis)
        torch._dynamo.mark_dynamic(labels, axis)
    return logits, labels


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1))


def masked(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits.reshape(-1, VOCABULARY).exp().sum(-1) * labels.reshape(-1)).sum()


def saved(function: Callable[..., Tensor], folder: Path, *inputs: Tensor) -> list[onnx.ModelProto]:
    compiled = torch.compile(function, backend="ort_train", options={"save_onnx": folder})
    compiled(*inputs).backward()
    return [onnx.load(path) for path in sorted(folder.glob("*.onnx"))]


def dims(model: onnx.ModelProto) -> set[str]:
    graph = model.graph
    values = (*graph.input, *graph.value_info, *graph.output)
    return {dim.dim_param for value in values for dim in value.type.tensor_type.shape.dim if "*" in dim.dim_param}


def joined(*sizes: Tensor) -> Tensor:
    first, second, third, last = (one.reshape(-1) for one in sizes)
    one, other = (first * second).sin() * second, (third * last).sin() * last
    return (other * one).exp().sum()


def test_flattened_batches_whose_equality_is_found_late_have_one_name(tmp_path: Path, lowered: None) -> None:
    inputs = [torch.randn(sizes, requires_grad=True) for sizes in ((3, 4), (2, 6), (6, 2), (4, 3))]
    for one in inputs:
        torch._dynamo.mark_dynamic(one, [0, 1])
    models = saved(joined, tmp_path, *inputs)
    assert [len(dims(model)) for model in models] == [1] * len(models)


@pytest.mark.parametrize("function", [loss, masked])
def test_flattened_batches_of_two_tensors_have_one_name(
    function: Callable[..., Tensor], tmp_path: Path, lowered: None
) -> None:
    models = saved(function, tmp_path, *batch(3, 4))
    assert [len(dims(model)) for model in models] == [1] * len(models)


def test_a_cross_entropy_of_flattened_batches_has_no_one_hot_matrix(tmp_path: Path) -> None:
    models = saved(loss, tmp_path, *batch(3, 4))
    scatters = [node for model in models for node in model.graph.node if node.op_type == "ScatterElements"]
    assert [onnx.helper.get_node_attr_value(node, "reduction") for node in scatters] == [b"add"]


def test_sizes_that_no_guard_makes_equal_keep_their_names(tmp_path: Path, lowered: None) -> None:
    def function(logits: Tensor, labels: Tensor) -> Tensor:
        return logits.reshape(-1, VOCABULARY).exp().sum() * labels.reshape(-1).cos().sum()

    logits, labels = batch(3, 4)
    compiled = torch.compile(function, backend="ort_train", options={"save_onnx": tmp_path})
    compiled(logits, labels)
    models = [onnx.load(path) for path in tmp_path.glob("*.onnx")]
    assert max(len(dims(model)) for model in models) == 2
    assert_close(compiled(logits, labels[:2]), function(logits, labels[:2]), "another size", strides=False)


@pytest.mark.parametrize("function", [loss, masked])
def test_the_same_graph_takes_other_sizes(function: Callable[..., Tensor]) -> None:
    compiled = torch.compile(function, backend="ort_train")
    for sizes in ((3, 4), (2, 7), (5, 3)):
        logits, labels = batch(*sizes)
        with torch.compiler.set_stance("default" if sizes == (3, 4) else "fail_on_recompile"):
            mine = compiled(logits, labels)
        (gradient,) = torch.autograd.grad(mine, logits)
        theirs = function(logits, labels)
        (expected,) = torch.autograd.grad(theirs, logits)
        assert_close(mine, theirs, f"the loss of {sizes}")
        assert_close(gradient, expected, f"the gradient of {sizes}")
