"""Exported training steps whose first values are in a file of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

from ort_dynamo.errors import InvalidArgumentError
from ort_dynamo.training import optim
from ort_dynamo.training.training_graph import export_training_graph

DESCRIPTION = {"inputs": [("x", ["n", 4]), ("y", ["n"])], "outputs": [("loss", [], True), ("scores", ["n", 3])]}


def export(model: nn.Module, **given: Any) -> onnx.ModelProto:
    x, y = torch.randn(5, 4, dtype=next(model.parameters()).dtype), torch.randint(3, (5,))
    loss = nn.functional.cross_entropy
    return export_training_graph(model, DESCRIPTION, optim.AdamConfig(lr=0.1), [x, y], loss_fn=loss, **given)


def trained(model: bytes, state: dict[str, Any]) -> list[Any]:
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_outputs()]
    feeds = {"x": np.linspace(-1, 1, 20, dtype=np.float32).reshape(5, 4), "y": np.array([0, 1, 2, 0, 1])}
    losses = []
    for _ in range(3):
        found = dict(zip(names, session.run(names, {**feeds, **state}), strict=True))
        state = state | {name.removesuffix(".updated"): found[name] for name in names if name.endswith(".updated")}
        losses.append(found["loss"])
    return losses


def test_it_trains_as_with_default_values_and_opens_without_a_warning(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = nn.Linear(4, 3)
    whole = export(model)
    apart = export(model, path=tmp_path / "made" / "step.onnx", state_path=tmp_path / "other" / "state.npz")
    assert not {one.name for one in apart.graph.input} & {one.name for one in apart.graph.initializer}
    assert [one.name for one in apart.graph.input] == [one.name for one in whole.graph.input]
    state = dict(np.load(tmp_path / "other" / "state.npz"))
    assert set(state) == {one.name for one in apart.graph.input} - {"x", "y"}
    capfd.readouterr()
    found = trained((tmp_path / "made" / "step.onnx").read_bytes(), state)
    assert "appears in graph inputs" not in "".join(capfd.readouterr())
    assert found == trained(whole.SerializeToString(), {})
    assert "appears in graph inputs" in "".join(capfd.readouterr()), "the text that it looks for is ONNX Runtime's"


def test_the_file_of_a_newer_opset_trains_from_its_state(tmp_path: Path) -> None:
    model = nn.Linear(4, 3)
    whole = export(model)
    apart = export(model, opset_version=21, state_path=tmp_path / "state.npz")
    state = dict(np.load(tmp_path / "state.npz"))
    assert {str(one.dtype) for one in state.values()} == {"float32", "float64", "int64"}
    assert trained(apart.SerializeToString(), state) == trained(whole.SerializeToString(), {})


@pytest.mark.parametrize("opset", [20, 21])
def test_a_dtype_that_numpy_lacks_is_refused(opset: int, tmp_path: Path) -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"expected None, since NumPy has no dtype for the BFLOAT16 of 'weight'"
    ):
        export(nn.Linear(4, 3).bfloat16(), opset_version=opset, state_path=tmp_path / "state.npz")
    assert not (tmp_path / "state.npz").exists()
