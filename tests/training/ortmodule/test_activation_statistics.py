"""Section 1.7 of ORTModule's reference: statistics of activations, and subscribers of the program's own."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import Dense, compiles
from torch import Tensor, nn

from ort_dynamo import ORTModule
from ort_dynamo.report.record import RECORDS
from ort_dynamo.training.utils.hooks import (
    GlobalSubscriberManager,
    StatisticsSubscriber,
    SubscriberBase,
    SubscriberManager,
    inspect_activation,
)
from ort_dynamo.training.utils.hooks.merge_activation_summary import main as merge


class Inspected(Dense):
    def forward(self, input1: Tensor) -> Tensor:
        return self.fc2(inspect_activation("hidden", torch.relu(self.fc1(input1))))


FILES = ["Inspected_0_0th_output", "Linear_1_0th_output", "Linear_2_0th_output", "hidden"]


@pytest.mark.parametrize("subscribed", ["before", "after"])
def test_statistics_of_both_runs_are_the_same(subscribed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_DISABLE")
    model = Inspected()
    batches = torch.randn(4, 3, 8)
    for name, one in (("pt", copy.deepcopy(model)), ("ort", copy.deepcopy(model))):
        subscriber = StatisticsSubscriber(str(tmp_path / name), start_step=1, end_step=3)
        if name == "ort" and subscribed == "after":
            one = ORTModule(one)
        GlobalSubscriberManager.subscribe(one, [subscriber])
        if name == "ort" and subscribed == "before":
            one = ORTModule(one)
        for batch in batches:
            one(batch).sum().backward()
    for name in ("pt", "ort"):
        assert sorted(path.name for path in (tmp_path / name).iterdir()) == ["step_1", "step_2"]
        for step in ("step_1", "step_2"):
            expected = {f"{file}_{direction}" for file in FILES for direction in ("forward", "backward")}
            assert {path.name for path in (tmp_path / name / step).iterdir()} == {*expected, "order.txt"}
    read = [(tmp_path / name / "step_2" / "hidden_backward").read_text() for name in ("pt", "ort")]
    assert read[0] == read[1]
    assert (tmp_path / "pt/step_2/order.txt").read_text().splitlines()[0] == "Linear_1_0th_output_forward"
    (tmp_path / "pt/step_1").rename(tmp_path / "pt/step_0")
    arguments = ["--pt_dir", str(tmp_path / "pt"), "--ort_dir", str(tmp_path / "ort")]
    merge([*arguments, "--output_dir", str(tmp_path / "merged")])
    sides = [(tmp_path / "merged" / side / "step_2_.txt").read_text() for side in ("merge_pt", "merge_ort")]
    assert sides[0].count("=" * 16) == sides[1].count("=" * 16) == 8
    with pytest.raises(FileExistsError, match="Enable --overwrite"):
        merge([*arguments, "--output_dir", str(tmp_path / "merged")])
    merge([*arguments, "--output_dir", str(tmp_path / "merged"), "--overwrite"])


def test_an_inspected_model_is_compiled_in_one_graph(tmp_path: Path) -> None:
    ort_model = ORTModule(Inspected())
    GlobalSubscriberManager.subscribe(ort_model, [StatisticsSubscriber(str(tmp_path / "out"))])
    before = compiles()
    ort_model(torch.randn(3, 8)).sum().backward()
    assert compiles() == before + 1
    assert not any(graph.eager for record in RECORDS for graph in record.graphs)


def test_statistics_are_right(tmp_path: Path) -> None:
    subscriber = StatisticsSubscriber(str(tmp_path / "out"), bucket_size=3)
    values = torch.tensor([0.0, -1.0, 2.0, 3.5, -4.0, 0.0, 7.0])
    subscriber.write(values, "values", 2, 0, is_forward=True)
    subscriber.write(torch.tensor([float("nan"), float("inf"), 1.0]), "odd", -1, 0, is_forward=False)
    subscriber.write(torch.tensor([], dtype=torch.float32), "empty", 0, 0, is_forward=True)
    subscriber.write(torch.tensor([True, False]), "mask", 0, 0, is_forward=True)
    lines = (tmp_path / "out/step_0/values_forward").read_text().splitlines()
    assert lines[0] == ">>values forward run shape: (7,) dtype: torch.float32 size: 7"
    assert lines[1] == f"min: -4 max: 7, mean: {values.mean():.6g}, std: {values.std():.6g}"
    assert lines[2:5] == ["nan: 0, inf: 0", "samples(top 128): 0 -1 2 3.5 -4 0 7", "neg: 2, pos: 3, zero: 2,"]
    odd = (tmp_path / "out/step_0/odd_backward").read_text()
    assert "nan: 1, inf: 1" in odd
    assert "zero: 1" in (tmp_path / "out/step_0/mask_forward").read_text()


@pytest.mark.parametrize("name", ["../../escaped", "/escaped", "a\nb", "\0", "..", "a" * 5000, "\u2028"])
def test_statistics_of_a_class_of_any_name_stay_in_their_folder(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    StatisticsSubscriber(str(folder)).write(torch.ones(2), name, 0, 0, is_forward=True)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    (order, written) = sorted((folder / "step_0").iterdir(), key=lambda path: path.name != "order.txt")
    assert order.read_text().split("\n") == [written.name, ""]


def test_a_list_of_files_outside_is_not_merged(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "pt" / "step_0").mkdir(parents=True)
    (tmp_path / "pt" / "step_0" / "order.txt").write_text("../../secret\n")
    folders = [f"--{name}={tmp_path / name.removesuffix('_dir')}" for name in ("pt_dir", "ort_dir", "output_dir")]
    with pytest.raises(ValueError, match="lists files outside of its folders"):
        merge(folders)
    assert not (tmp_path / "output").exists()


def test_errors_of_statistics(tmp_path: Path) -> None:
    with pytest.raises(FileExistsError, match="Set override_output_dir=True"):
        StatisticsSubscriber(str(tmp_path))
    with pytest.warns(UserWarning, match="already exists, overriding it"):
        StatisticsSubscriber(str(tmp_path), override_output_dir=True)
    manager = SubscriberManager()
    with pytest.raises(RuntimeError, match=r"No subscribers are registered."):
        manager.subscribe(Dense(), [])
    with pytest.raises(ValueError, match=r"module must be a torch.nn.Module instance"):
        manager.subscribe(torch.relu, [SubscriberBase(None, None)])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="subscriber must be a SubscriberBase instance"):
        manager.subscribe(Dense(), ["nobody"])  # type: ignore[list-item]
    with pytest.raises(RuntimeError, match="is not registered"):
        manager.get_subscriber(StatisticsSubscriber)
    GlobalSubscriberManager.subscribe(Dense(), [SubscriberBase(None, None)])
    with pytest.raises(RuntimeError, match=r"StatisticsSubscriber is not registered, cannot inspect activation."):
        inspect_activation("x", torch.ones(1))


class Watching(SubscriberBase):
    def __init__(self, **steps: int | None) -> None:
        super().__init__(**{"start_step": None, "end_step": None, **steps})
        self.seen: list[str] = []

    def pre_forward_module_apply_impl(self, run_rtx: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self.seen.append(f"before {type(module).__name__}")
        return args, kwargs

    def post_forward_tensor_apply_impl(self, run_rtx: Any, module: nn.Module, tensor_index: int, tensor: Tensor) -> Any:
        return tensor * 2 if isinstance(module, nn.Linear) else tensor

    def post_forward_outmost_module_apply_impl(self, run_rtx: Any, module: nn.Module, args: Any, outputs: Any) -> Any:
        self.seen.append(f"end of step {run_rtx.global_states.execution_step}")
        return args, outputs


def test_a_subscriber_of_the_programs_looks_and_changes() -> None:
    model = Dense()
    x = torch.randn(3, 8)
    expected = model.fc2(torch.relu(model.fc1(x) * 2)) * 2
    ort_model = ORTModule(model)
    manager, watching = SubscriberManager(), Watching(start_step=0, end_step=2)
    manager.subscribe(ort_model, [watching])
    for step in range(3):
        found = ort_model(x)
        torch.testing.assert_close(found, expected if step < 2 else model.fc2(torch.relu(model.fc1(x))))
    one = ["before Dense", "before Linear", "before Linear"]
    assert watching.seen == [*one, "end of step 0", *one, "end of step 1"]
    assert manager.get_subscriber(Watching) is watching
    assert manager.get_run_context().global_states.execution_step == 3
