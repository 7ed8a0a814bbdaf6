"""Names of an ONNX model are only names: no text of them is run, and each weight is read by its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import helper
from small_graphs import graph_of, model_of, value

from ort_dynamo import ORTTrainer, optim
from ort_dynamo.onnx_module import OnnxModule, to_model_proto

NAMES = [
    *(
        "w",
        "\uff57",
        "ª",
        "a",
        "class",
        "None",
        "lambda",
        "import",
        "self",
        "root",
        "__class__",
        "_parameters",
        "forward",
    ),
    *("__import__('os').system('touch escaped')", '"""', "'", '"', "\\", "a\nb", "\0", "\u2028", "x1\u200b", "é"),
    *("../../escaped", "/etc/passwd", "</script>", "*/", "{0}%s", "a.b", "a.class", ".", "..", "a" * 3000),
]


def sum_of(names: list[str]) -> onnx.ModelProto:
    """A model that adds a different power of 2 under each name to its input."""
    nodes, before = [], "input 'x'"
    for name in names:
        nodes.append(helper.make_node("Add", [before, name], [f"{name} sum"], name=f"{name} node", doc_string=name))
        before = f"{name} sum"
    nodes.append(helper.make_node("ReduceMean", [before], ["loss"], keepdims=0))
    data = {name: np.full(2, 2.0**index) for index, name in enumerate(names)}
    return model_of(graph_of(nodes, [value("input 'x'", (2,))], [value("loss", ())], data))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_weight_is_read_by_its_own_name(folder: Path) -> None:
    names = NAMES[:23]  # as many as a float32 counts exactly
    model = sum_of(names)
    module = OnnxModule(model)
    assert sorted(module.onnx_names.values()) == sorted(names)
    expected = float(sum(2.0**index for index in range(len(names))))
    assert module(torch.zeros(2))[0].item() == expected
    assert torch.compile(module, backend="ort_train")(torch.zeros(2))[0].item() == expected
    assert to_model_proto(module).SerializeToString() == model.SerializeToString()
    assert not list(folder.iterdir())


def test_a_trainer_trains_weights_of_any_name(folder: Path) -> None:
    desc = {"inputs": [("input 'x'", [2])], "outputs": [("loss", [], True)]}
    trainer = ORTTrainer(sum_of(NAMES), desc, optim.SGDConfig(lr=1.0))
    trainer.train_step(torch.zeros(2))
    trainer.save_as_onnx("trained.onnx")
    assert [path.name for path in folder.iterdir()] == ["trained.onnx"]
    trained = {one.name: onnx.numpy_helper.to_array(one) for one in onnx.load("trained.onnx").graph.initializer}
    assert trained.keys() == {*NAMES}
    for index, name in enumerate(NAMES):
        np.testing.assert_allclose(trained[name], 2.0**index - 0.5)
