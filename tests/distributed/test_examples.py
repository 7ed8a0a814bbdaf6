"""The scripts of examples/distributed, each run as torchrun runs it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from ranks import Ranks, Result, describe, script

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "distributed"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))
KILLED = Path(__file__).with_name("killed_while_it_writes.py")
WORLDS = {"fsdp2_tp": 4}
"""Examples that need more than two ranks."""


def losses(text: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+): loss ([\d.]+)", text)}


def assert_all_compiled(results: list[Result]) -> None:
    assert not any(result.exitcode for result in results), describe(results)
    for result in results:
        assert result.value.islands > 0
        assert not result.value.skipped


@pytest.mark.parametrize("name", [name for name in NAMES if name != "checkpoint_resume"])
def test_an_example_trains(ranks: Ranks, name: str) -> None:
    results = ranks.outcomes(script, WORLDS.get(name, 2), str(EXAMPLES / f"{name}.py"))
    assert_all_compiled(results)
    found = losses("".join(result.printed for result in results))
    assert list(found) == [5, 10, 15, 20]
    assert found[20] < found[5]


def train_on(ranks: Ranks, world: int, place: Path) -> dict[int, float]:
    """Run the example with a checkpoint; the losses of the steps that it took."""
    results = ranks.outcomes(script, world, str(EXAMPLES / "checkpoint_resume.py"), str(place))
    assert_all_compiled(results)
    return losses(results[0].printed)


def assert_goes_on(later: dict[int, float], before: dict[int, float], steps: range) -> None:
    assert list(later) == list(steps)
    for step in later.keys() & before.keys():
        assert later[step] == pytest.approx(before[step], rel=2e-5, abs=1e-6)


def test_training_goes_on_with_fewer_ranks(ranks: Ranks, tmp_path: Path) -> None:
    place = tmp_path / "checkpoints"
    place.mkdir()
    before = train_on(ranks, 4, place)
    assert list(before) == list(range(1, 11))
    assert_goes_on(train_on(ranks, 2, place), before, range(9, 11))


def test_a_rank_that_is_killed_while_it_writes_leaves_the_checkpoint_before(ranks: Ranks, tmp_path: Path) -> None:
    place = tmp_path / "checkpoints"
    place.mkdir()
    results = ranks.outcomes(script, 2, str(KILLED), str(EXAMPLES / "checkpoint_resume.py"), str(place))
    assert [result.exitcode for result in results] == [1, -signal.SIGKILL], describe(results)
    assert list((place / "unfinished-8").glob("__1_*"))
    assert [path.name for path in place.glob("step-*")] == ["step-0004"]
    before = losses(results[0].printed)
    assert list(before) == list(range(1, 9))
    assert_goes_on(train_on(ranks, 2, place), before, range(5, 11))


def torchrun(arguments: list[str], environment: Mapping[str, str]) -> str:
    """Run torchrun on this machine, and return the output of its ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *arguments]
    with subprocess.Popen(
        command, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as agent:
        try:
            printed, errors = agent.communicate(timeout=150)
        except subprocess.TimeoutExpired:
            agent.terminate()  # it ends its ranks
            raise
    assert agent.returncode == 0, errors
    return printed


def test_torchrun_starts_all_ranks_again_where_one_is_killed(ranks: Ranks, tmp_path: Path) -> None:
    place = tmp_path / "checkpoints"
    place.mkdir()
    program = [str(KILLED), str(EXAMPLES / "checkpoint_resume.py"), str(place)]
    variables = {**ranks.environment, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    printed = torchrun(["--nproc-per-node", "2", "--max-restarts", "1", *program], variables)
    assert [int(step) for step in re.findall(r"step (\d+): loss", printed)] == [*range(1, 9), *range(5, 11)]
    before, after = (losses(part) for part in re.split(r"(?<=step 8: loss \d\.\d{6})", printed, maxsplit=1))
    assert_goes_on(after, before, range(5, 11))
