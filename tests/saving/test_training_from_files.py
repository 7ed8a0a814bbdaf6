"""Saved files suffice to train: their names are those of the model, and a file describes how they join."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import transformers
from numpy_glue import run_graph
from torch.nn import functional

LAYERS = 12


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, torch.Tensor, torch.Tensor]:
    """The folder, the model with its gradients, the input and the gradient of its logits."""
    torch._dynamo.reset()
    folder = tmp_path_factory.mktemp("graphs")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=LAYERS, n_embd=16, n_head=2, vocab_size=40, n_positions=16, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    ids = torch.randint(0, 40, (2, 8))
    logits = torch.compile(model, backend="ort_train", options={"save_onnx": folder})(input_ids=ids).logits
    logits.retain_grad()
    functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    return folder, model, ids, logits.grad


def join(folder: Path) -> Any:
    (file,) = folder.glob("*.json")
    return json.loads(file.read_text())


def test_the_joined_models_train_with_numpy_between_them(saved: Any) -> None:
    folder, model, ids, gradient = saved
    forward, backward = (next(g for g in join(folder)["graphs"] if g["role"] == r) for r in ("forward", "backward"))
    values = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    values = run_graph(forward, {**values, "input_ids": ids.numpy()}, folder)
    values = run_graph(backward, {**values, "output_0.grad": gradient.numpy()}, folder)
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(values[f"{name}.grad"], parameter.grad.numpy(), rtol=1e-4, atol=1e-6, err_msg=name)


def test_the_optimized_models_give_the_same(saved: Any) -> None:
    folder, model, ids, _ = saved
    (forward,) = (g for g in join(folder)["graphs"] if g["role"] == "forward")
    values = {**{name: tensor.numpy() for name, tensor in model.state_dict().items()}, "input_ids": ids.numpy()}
    (logits,) = (o["value"] for o in forward["outputs"] if o["value"] == "output_0")
    rewritten, optimized = (run_graph(forward, values, folder, stage)[logits] for stage in ("rewritten", "optimized"))
    np.testing.assert_allclose(rewritten, optimized, rtol=1e-5, atol=1e-6)


def test_every_weight_is_an_input_by_its_name(saved: Any) -> None:
    folder, model, _, _ = saved
    said = join(folder)
    inputs = {one["value"] for graph in said["graphs"] for one in graph["inputs"]}
    others = {other for name in inputs for other in said["aliases"].get(name, ())}
    assert set(model.state_dict()) <= inputs | others
    assert said["aliases"] == {"transformer.wte.weight": ["lm_head.weight"]}
    in_models = {value.name for file in folder.glob("forward-*.onnx") for value in onnx.load(file).graph.input}
    assert {name for name, _ in model.named_parameters()} <= in_models


@pytest.mark.parametrize("stage", ["lowered", "", "optimized"])
@pytest.mark.parametrize("role", ["forward", "backward"])
def test_every_node_names_its_module(saved: Any, stage: str, role: str) -> None:
    folder, model, _, _ = saved
    modules = dict(model.named_modules())
    forwards = [onnx.load(file).graph for file in (folder / "lowered").glob("forward-*.onnx")]
    in_forward = {node.name for graph in forwards for node in graph.node}
    for file in (folder / stage).glob(f"{role}-*.onnx"):
        graph = onnx.load(file).graph
        outputs = {value.name for value in graph.output}
        seen, again = set(), set()
        for node in graph.node:
            path = node.name.partition("/")[0]
            assert path in modules or path == "GPT2LMHeadModel", node.name
            assert all(value.partition("/")[0] == path or value in outputs for value in node.output), node
            meta = {prop.key: prop.value for prop in node.metadata_props}
            if path in modules and path:
                assert f"{path}: {type(modules[path]).__name__}" in meta["namespace"]
            assert "modeling_gpt2.py" in meta["pkg.torch.onnx.stack_trace"] or path == "GPT2LMHeadModel", node.name
            if meta["ort_dynamo.direction"] != role:  # recomputed, or a view that is not merged yet
                assert node.name in in_forward or stage == "lowered", node.name
                again.add(node.name)
            seen.add(path)
        assert len(again) <= 2 * LAYERS or stage == "lowered", "x/2 and 1 + tanh of each GELU"
        assert {f"transformer.h.{layer}.mlp.c_fc" for layer in range(LAYERS)} <= seen


@pytest.mark.parametrize("stage", ["lowered", ""])
def test_the_files_are_valid(saved: Any, stage: str) -> None:
    for file in (saved[0] / stage).glob("*.onnx"):
        model = onnx.load(file)
        onnx.checker.check_model(model)
        names = [node.name for node in model.graph.node]
        assert len(set(names)) == len(names)
