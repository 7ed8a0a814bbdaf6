"""The demo's output, its requirements, and its errors for bad arguments."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ort_dynamo.__main__ import main
from ort_dynamo.commands.demo import data, models, program, training, verdict
from ort_dynamo.commands.demo.training import Outcome, Trace
from ort_dynamo.errors import MissingPackageError


@dataclasses.dataclass(frozen=True)
class Run:
    status: int
    output: str
    folder: Path


@pytest.fixture(scope="module")
def short_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    pytest.importorskip("sklearn")
    pytest.importorskip("tqdm")
    folder = tmp_path_factory.mktemp("onnx") / "new"
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        status = main(["demo", "--steps", "3", "--save-onnx", str(folder)])
    return Run(status, output.getvalue(), folder)


def test_a_short_run_succeeds_and_lists_unchecked_requirements(short_run: Run) -> None:
    assert short_run.status == 0, short_run.output
    assert "NOT OK" not in short_run.output
    assert short_run.output.count("(needs 20 steps)") == 2
    assert short_run.output.count("(needs 200 steps)") == 3
    assert "2 requirement(s) met, 0 not met, 5 not checked" in short_run.output


def test_every_promised_fact_is_printed_for_both_models(short_run: Run) -> None:
    for fact in (
        "loss at step 3: eager ",
        "greatest relative difference of the losses: ",
        "first step, with compilation: eager ",
        "median step: eager ",
        "graphs compiled: ",
        "ok          no node in eager (fallback): 0",
        " in torch by design, ",
    ):
        assert short_run.output.count(fact) >= 2, fact
    assert short_run.output.count("test accuracy: eager ") == 1
    assert "graphs compiled: 3" in short_run.output  # digits: forward, backward, inference
    assert "graphs compiled: 2" in short_run.output  # gpt: forward, backward


def test_the_onnx_files_are_where_the_demo_says(short_run: Run) -> None:
    for model, roles in {"digits": {"forward", "backward", "inference"}, "gpt": {"forward", "backward"}}.items():
        files = list((short_run.folder / model).glob("*.onnx"))
        assert {file.name.split("-")[0] for file in files} == roles
        assert f"ONNX files written to {short_run.folder / model}: {len(files)}" in short_run.output
        for file in files:
            assert file.name in short_run.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "required: COMMAND"),
        (["dome"], "invalid choice: 'dome'"),
        (["demo", "--steps", "ten"], "--steps: invalid whole number value: 'ten'"),
        (["demo", "--steps", "0"], "--steps: 0 is too small: give 1 or more"),
        (["demo", "--seed", "-1"], "--seed: -1 is not a seed"),
        (["demo", "--model", "bert"], "--model: invalid choice: 'bert'"),
        (["demo", "--save-onnx", __file__], f"--save-onnx: cannot make the folder {__file__}"),
    ],
)
def test_bad_arguments_give_usage_and_the_reason(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    errors = capsys.readouterr().err
    assert errors.startswith("usage: python -m ort_dynamo")
    assert said in errors


def test_help_lists_the_commands_without_importing_torch() -> None:
    code = (
        "import sys\n"
        "from ort_dynamo.__main__ import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: assert 'torch' not in sys.modules\n"
        "else: raise AssertionError"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "demo" in finished.stdout


def test_missing_packages_are_named_with_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["demo", "--steps", "1"]) == 2
    errors = capsys.readouterr().err
    assert "tqdm and scikit-learn" in errors
    assert "'.[demo]'" in errors


def test_the_gpt_alone_does_not_need_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match=r"needs tqdm\."):
        program.run_demo(["gpt"], 1, 0, None)


def _outcome(**changes: object) -> Outcome:
    losses = [1.0] * 200
    good = Outcome(
        eager=Trace(losses, [0.5] * 200, 0.97),
        ort=Trace(list(losses), [0.25] * 200, 0.96),
        counts={"graphs": 3, "islands": 3, "native_nodes": 50, "eager_nodes": 0},
        reasons={},
    )
    return dataclasses.replace(good, **changes)  # type: ignore[arg-type]


def _states(outcome: Outcome) -> list[str]:
    return [found.state for found in verdict.judge(outcome)]


def test_equal_curves_meet_every_requirement() -> None:
    assert _states(_outcome()) == ["ok"] * 4


@pytest.mark.parametrize(
    ("step", "loss", "expected"),
    [
        (0, 1 + 0.9e-4, ["ok", "ok"]),
        (19, 1 + 1.1e-4, ["NOT OK", "ok"]),
        (20, 1 + 1.1e-4, ["ok", "ok"]),
        (199, 1 + 0.019, ["ok", "ok"]),
        (100, 1 - 0.021, ["ok", "NOT OK"]),
        (5, float("nan"), ["NOT OK", "NOT OK"]),
        (150, float("nan"), ["ok", "NOT OK"]),
        (150, float("inf"), ["ok", "NOT OK"]),
    ],
)
def test_a_loss_that_differs_at_one_step_is_seen(step: int, loss: float, expected: list[str]) -> None:
    losses = [1.0] * 200
    losses[step] = loss
    assert _states(_outcome(ort=Trace(losses, [0.25] * 200, 0.96)))[:2] == expected


@pytest.mark.parametrize(("steps", "expected"), [(19, ["not checked"] * 3), (20, ["ok", "not checked", "not checked"])])
def test_too_few_steps_are_not_a_verdict(steps: int, expected: list[str]) -> None:
    trace = Trace([1.0] * steps, [0.5] * steps, 0.1)
    assert _states(_outcome(eager=trace, ort=trace))[:3] == expected


def test_low_accuracy_and_nodes_in_eager_are_not_ok() -> None:
    poor = Trace([1.0] * 200, [0.25] * 200, 0.94)
    assert _states(_outcome(ort=poor)) == ["ok", "ok", "NOT OK", "ok"]
    counts = {"graphs": 2, "native_nodes": 50, "eager_nodes": 1}
    in_eager = _outcome(counts=counts, reasons={"aten.cumprod.default: no lowering": 1})
    assert _states(in_eager) == ["ok", "ok", "ok", "NOT OK"]
    assert "  1 of aten.cumprod.default: no lowering" in verdict.describe(in_eager)


def test_where_the_nodes_run_is_in_the_summarys_words() -> None:
    counts = {"graphs": 3, "native_nodes": 0, "by_design_nodes": 1, "chosen_nodes": 98, "eager_nodes": 0}
    lines = verdict.describe(_outcome(counts=counts))
    assert lines[-2:] == [
        "graphs compiled: 3; nodes: 0 in ONNX Runtime, 1 in torch by design, 98 in torch by choice (placement), "
        "0 in eager (fallback)",
        "  torch runs operators by choice where it is faster, such as conv nets on a CPU. "
        'Set options={"placement": "onnxruntime"} to '
        "run these operators in ONNX Runtime.",
    ]
    assert "by choice where" not in "".join(verdict.describe(_outcome()))
    assert str(verdict.judge(_outcome())[-1]) == "ok          no node in eager (fallback): 0"


def test_a_run_in_which_nothing_was_compiled_is_not_ok() -> None:
    assert _states(_outcome(counts={})) == ["ok", "ok", "ok", "NOT OK"]


def test_step_times_leave_out_the_compiling_step() -> None:
    eager = Trace([1.0] * 4, [9.0, 0.002, 0.004, 0.006])
    ort = Trace([1.0] * 4, [70.0, 0.001, 0.003, 0.009])
    lines = verdict.describe(_outcome(eager=eager, ort=ort))
    assert "first step, with compilation: eager 9000.0 ms, ort_train 70000.0 ms" in lines
    assert "median step: eager 4.0 ms, ort_train 3.0 ms; median ratio of pairs 0.75" in lines


def test_an_unmet_requirement_is_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tqdm")
    worse = _outcome(ort=Trace([2.0] * 200, [0.25] * 200))
    monkeypatch.setattr(program, "train_side_by_side", lambda *arguments: worse)
    assert main(["demo", "--model", "gpt"]) == 1
    assert "1 requirement(s) met, 2 not met, 0 not checked" in capsys.readouterr().out


class _Forgetful(torch.nn.Module):
    """Trains differently once it is compiled; the demo must notice it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        scale = 2.0 if torch.compiler.is_compiling() else 1.0
        return ((self.weight * inputs - targets) ** 2).mean() + (scale - 1) * self.weight.abs()


@pytest.mark.parametrize(("load", "said"), [(0.1, False), (1000.0, True)])
def test_a_busy_machine_is_said(
    load: float, said: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tqdm")
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    monkeypatch.setattr(program, "train_side_by_side", lambda *arguments: _outcome())
    assert main(["demo", "--model", "gpt"]) == 0
    assert ("this machine is busy" in capsys.readouterr().out) == said


def test_a_training_that_goes_another_way_is_noticed() -> None:
    generator = torch.Generator().manual_seed(0)
    batches = iter([(torch.rand(8, generator=generator), torch.rand(8, generator=generator)) for _ in range(20)])
    outcome = training.train_side_by_side(
        training.Task("t", _Forgetful(), batches, 0.01), 20, 0, {}, lambda eager, ort: None
    )
    assert len(outcome.eager.losses) == len(outcome.ort.losses) == 20
    assert _states(outcome)[0] == "NOT OK"


def test_digit_batches_have_one_size_and_no_image_twice_in_an_epoch() -> None:
    labels = torch.arange(10)
    digits = data.Digits(labels.float().view(10, 1, 1, 1), labels, labels[:0].float(), labels[:0])
    batches = data.digit_batches(digits, 4, torch.Generator().manual_seed(0))
    epoch = [next(batches), next(batches)]
    assert all(torch.equal(images.flatten().long(), chosen) for images, chosen in epoch)
    seen = torch.cat([chosen for _, chosen in epoch])
    assert len(seen) == len(set(seen.tolist())) == 8


def test_targets_of_the_text_are_its_tokens_one_place_later() -> None:
    text = torch.arange(100, dtype=torch.uint8)
    tokens, targets = next(data.text_batches(text, 5, 8, torch.Generator().manual_seed(0)))
    assert tokens.shape == targets.shape == (5, 8)
    assert torch.equal(targets, tokens + 1)


def test_the_library_text_is_python_source() -> None:
    text = data.read_library_text(1000)
    assert text.dtype is torch.uint8
    assert text.shape == (1000,)
    assert b"import" in bytes(data.read_library_text(20_000).tolist())


def test_the_gpt_does_not_look_ahead() -> None:
    torch.manual_seed(0)
    model = models.ByteGPT(context=8, width=16, layers=1, heads=2).eval()
    tokens = torch.randint(256, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 256
    same = torch.isclose(model(tokens), model(changed), atol=1e-6).all(dim=-1)[0]
    assert same[:5].all()
    assert not same[5]
