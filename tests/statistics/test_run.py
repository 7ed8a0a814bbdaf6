"""The statistics of a run, as text and as files."""

from __future__ import annotations

import csv
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ort_dynamo import RunStatistics, ValueStatistics, collect_statistics, load_statistics
from ort_dynamo.errors import InvalidArgumentError

VALUE = ValueStatistics(
    step=3,
    graph=1,
    role="forward",
    index=7,
    node="div",
    overload="aten.div.Tensor",
    module="layers.0 (Ratio)",
    line='File "a, b.py", line 3, in forward return x / "0"',
    dtype="bfloat16",
    shape=(2, 3),
    min=-1.0 / 3,
    max=1e300,
    mean=0.1,
    std=5e-324,
    nan=1,
    inf=2,
    begins="nan",
    fused=("aten.mm.default", "aten.exp.default"),
)
EMPTY = replace(VALUE, shape=(), min=None, max=None, mean=None, std=None, begins="", fused=(), module="", line="")


@pytest.mark.parametrize("name", ["run.json", "run.csv"])
def test_a_file_gives_back_each_row(name: str, tmp_path: Path) -> None:
    run = RunStatistics([VALUE, EMPTY])
    run.save(tmp_path / name)
    run.save(str(tmp_path / name))  # replaces it
    assert load_statistics(tmp_path / name).statistics == [VALUE, EMPTY]
    assert load_statistics(str(tmp_path / name)).first_nan() == VALUE


@pytest.mark.parametrize("name", ["run.json", "run.csv"])
def test_a_file_of_a_real_run_gives_back_each_row(name: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    with collect_statistics() as run:
        torch.compile(model, backend="ort_train")(torch.randn(3, 4)).sum().backward()
    run.save(tmp_path / name)
    found = load_statistics(tmp_path / name)
    assert found.statistics == run.statistics
    assert str(found) == str(run)


def test_the_files_are_plain_tables(tmp_path: Path) -> None:
    RunStatistics([VALUE]).save(tmp_path / "run.json")
    RunStatistics([VALUE]).save(tmp_path / "run.csv")
    (row,) = json.loads((tmp_path / "run.json").read_text())
    assert row == {**asdict(VALUE), "shape": [2, 3], "fused": [*VALUE.fused]}
    with (tmp_path / "run.csv").open(newline="") as file:
        (line,) = csv.DictReader(file)
    assert (line["shape"], line["nan"], line["line"]) == ("2x3", "1", VALUE.line)


@pytest.mark.parametrize("reader", ["read_json", "read_csv"])
def test_pandas_reads_a_file(reader: str, tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    path = tmp_path / f"run.{reader.removeprefix('read_')}"
    RunStatistics([VALUE, EMPTY]).save(path)
    frame = getattr(pandas, reader)(path)
    assert [*frame["node"]] == ["div", "div"]
    assert [*frame["nan"]] == [1, 1]
    assert frame["mean"].isna().sum() == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.txt", ""),
        ("run.json", "{"),
        ("run.json", '[{"step": 1}]'),
        ("run.json", "3"),
        ("run.json", "{}"),
        ("run.csv", ""),
        ("run.csv", '[{"step": 1}]'),
        ("run.csv", "step\n1\n"),
        ("run.csv", "x" * 200_000),  # longer than a field may be
    ],
)
def test_another_file_is_refused(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InvalidArgumentError, match=r"^load_statistics\(\) cannot take path=.*") as raised:
        load_statistics(tmp_path / name)
    assert str(raised.value).count("load_statistics") == 1


@pytest.mark.parametrize("name", ["run.json", "run.csv"])
def test_a_file_that_was_cut_off_is_refused_or_has_whole_rows(name: str, tmp_path: Path) -> None:
    RunStatistics([VALUE, EMPTY]).save(tmp_path / name)
    written = (tmp_path / name).read_text().rstrip()
    for end in range(1, len(written)):
        (tmp_path / name).write_text(written[:end])
        try:
            found = load_statistics(tmp_path / name).statistics
        except InvalidArgumentError:
            continue
        assert name == "run.csv"
        assert len(found) < 2 or written[:end].count(",") == written.count(",")


def test_a_file_is_not_written_in_another_form(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"\.json or \.csv"):
        RunStatistics([VALUE]).save(tmp_path / "run.parquet")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("begins", "infinities", "found"),
    [("nan", True, 0), ("nan", False, 0), ("inf", True, 0), ("inf", False, None), ("", True, None)],
)
def test_the_first_row_where_something_begins_is_found(begins: Any, infinities: bool, found: int | None) -> None:
    rows = [EMPTY, replace(VALUE, begins=begins), EMPTY]
    expected = None if found is None else rows[1]
    assert RunStatistics(rows).first_nan(infinities=infinities) == expected


def test_a_row_names_its_place_and_the_operators_that_ran_with_it() -> None:
    assert str(VALUE) == (
        "div = aten.div.Tensor of layers.0 (Ratio) (step 3, forward): 1 NaN, 2 infinite, or of one that ran with it: "
        'aten.mm.default, aten.exp.default\n  File "a, b.py", line 3, in forward return x / "0"'
    )
    assert str(EMPTY) == "div = aten.div.Tensor (step 3, forward): 1 NaN, 2 infinite"


def test_a_long_table_ends_with_the_number_of_rows_left_out() -> None:
    lines = str(RunStatistics([EMPTY] * 201)).splitlines()
    assert len(lines) == 1 + 1 + 200 + 1
    assert lines[-1] == "… and 1 more; save() writes all"
