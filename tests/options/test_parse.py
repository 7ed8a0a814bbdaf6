"""Parsing and validation."""

from __future__ import annotations

import dataclasses
import gc
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch

from ort_dynamo import PropagateCastOpsStrategy
from ort_dynamo.errors import InvalidOptionError, UnknownModeError, UnknownOptionError
from ort_dynamo.options import public
from ort_dynamo.options.groups import (
    MODES,
    CacheOptions,
    DumpOptions,
    Options,
    PassOptions,
    RecomputeOptions,
    SessionOptions,
    parse_options,
)
from ort_dynamo.options.plan_grammar import Plan, PlanType
from ort_dynamo.options.public import DEBUG, DEPRECATED
from ort_dynamo.runtime.installed.capabilities import installed_runtime
from ort_dynamo.runtime.installed.importing import binding


def test_nothing_gives_the_defaults() -> None:
    assert parse_options(None, None) == parse_options("default", {}) == Options()


def test_options_reach_their_group_and_win_over_the_mode() -> None:
    parsed = parse_options("debug", {"fallback": "error", "debug": {"verify": False}})
    assert parsed.segment.fallback == "error"
    assert not parsed.dump.verify
    assert parsed.session.graph_optimization == "disable"


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_parses(mode: str) -> None:
    parse_options(mode, None)


def test_groups_are_frozen_and_hashable() -> None:
    options = parse_options(None, {"session_options": {"provider_options": {"b": 1, "a": "2"}}})
    assert options.session.provider_options == (("a", "2"), ("b", "1"))
    assert hash(options) == hash(parse_options(None, {"session_options": {"provider_options": {"a": 2, "b": "1"}}}))
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.session.graph_optimization = "basic"  # type: ignore[misc]


def test_a_path_object_is_a_path(tmp_path: Path) -> None:
    assert DumpOptions(save_onnx=tmp_path).save_onnx == str(tmp_path)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"fallbak": "eager"}, UnknownOptionError, r"did you mean 'fallback'\?"),
        ({"zzz": 1}, UnknownOptionError, r"no option 'zzz'\. Known options: memory_budget, placement, "),
        ({3: 1}, UnknownOptionError, "no option 3"),
        ({"fallback": None}, InvalidOptionError, "'fallback' cannot be None"),
        ({"debug": {"fuse": 1}}, InvalidOptionError, r"option \"debug\['fuse'\]\" cannot be 1: expected True or False"),
        ({"debug": {"verify": "yes"}}, InvalidOptionError, "expected True or False"),
        ({"debug": {"verfy": True}}, UnknownOptionError, r"no option 'debug\.verfy' \(did you mean 'verify'\?\)"),
        ({"debug": True}, InvalidOptionError, "'debug' cannot be True: expected a dict"),
        ({"save_onnx": 3}, InvalidOptionError, "None or the path of a folder"),
        ({"save_onnx": True}, InvalidOptionError, "None or the path of a folder"),
        ({"providers": ["x"]}, UnknownOptionError, "the device of the model.s tensors chooses the execution provider"),
        ({"threads": True}, InvalidOptionError, "'threads' cannot be True: expected None or an int >= 1"),
        ({"threads": 1.5}, InvalidOptionError, "an int >= 1"),
        ({"threads": 2**31}, InvalidOptionError, "of 32 bits"),
        ({"threads": 100_000}, InvalidOptionError, "an int from 1 to 4096"),
        ({"memory_budget": "9" * 400 + "GiB"}, InvalidOptionError, "'memory_budget' cannot be '9"),
        ({"session_options": ("a", "b")}, InvalidOptionError, "an onnxruntime.SessionOptions or a dict"),
        ({"session_options": {"log_severity_level": float("inf")}}, InvalidOptionError, "cannot be inf: expected a"),
        ({"session_options": {"graph_optimization_level": 1.7}}, InvalidOptionError, "cannot be 1.7: expected a"),
        ({"session_options": {"provider_options": ("a",)}}, InvalidOptionError, "expected a dict of str to str"),
        ({"recompute_plan": "Gelu+:1:" + "9" * 5000}, InvalidOptionError, "'recompute_plan' cannot be 'Gelu"),
        ({"memory_budget": float("nan")}, InvalidOptionError, r"'memory_budget' cannot be nan: expected a fraction"),
        ({"extra_passes": 5}, InvalidOptionError, "a list of instances of torch.fx's PassBase"),
        ({"save_onnx": "a\0b"}, InvalidOptionError, "None or the path of a folder"),
        ({"cache": "a\0b"}, InvalidOptionError, "'cache' cannot be .*the path of a folder"),
        ({"session_options": {"intra_op_num_threads": "x"}}, InvalidOptionError, "an int >= 1"),
        ({"session_options": {"log_severity_level": ("a", "b")}}, InvalidOptionError, "a text, a number, a bool or"),
        ({"recompute_plan": "x" * 100_000}, InvalidOptionError, "cannot be 'x{200}…': expected"),
        ({"graph_optimization": "most"}, InvalidOptionError, "'disable', 'basic', 'extended', 'all'"),
        (
            {"session_options": {"provider_options": "a=b"}},
            InvalidOptionError,
            r"session_options\['provider_options'\].*a dict",
        ),
        ({"session_options": {"graph_optimization_level": 7}}, InvalidOptionError, "cannot be 7: expected one of 0, 1"),
        ({"session_options": 1}, InvalidOptionError, "an onnxruntime.SessionOptions or a dict"),
        ({"debug": {"contrib_ops": 1}}, InvalidOptionError, "expected True or False"),
        ({"cache": 3}, InvalidOptionError, "None, True, False or the path of a folder"),
        (
            {"recompute_plan": "layer"},
            InvalidOptionError,
            r"'layer': expected .* 'layers:N' or a cluster .*\(did you mean 'layers'\?\)",
        ),
        ({"recompute_plan": "layers:x"}, InvalidOptionError, r"'layers:x': .* \(did you mean 'layers:N'\?\)"),
        ([("fallback", "eager")], InvalidOptionError, "expected a dict"),
        (
            {"recompute_plan": "Gelu:1:-1"},
            InvalidOptionError,
            r"'Gelu:1:-1': .* or a cluster '<cluster>:<type>:<count>'",
        ),
        ({"recompute_plan": "Gelu+:3:-1"}, InvalidOptionError, r"a type of 0, 1 or 2"),
        ({"recompute_plan": "Gelu+:1:-2"}, InvalidOptionError, r"a count of -1 or more"),
        ({"recompute_plan": "Gelu+:1"}, InvalidOptionError, r"'Gelu\+:1': expected .* '<cluster>"),
        ({"recompute_plan": ["Gelu+:1:1", "Gelu+:1:2"]}, InvalidOptionError, r"Gelu\+:1 is there twice"),
        ({"recompute_plan": ["Gelu+:1:1", 3]}, InvalidOptionError, "plans as text joined by commas, a list"),
        ({"recompute_plan": 1}, InvalidOptionError, "plans as text joined by commas, a list"),
        (
            {"recompute_plan": "missing.json"},
            InvalidOptionError,
            "'missing.json': expected a JSON.*No such file",
        ),
        ({"cast_strategy": "flood"}, InvalidOptionError, "INSERT_AND_REDUCE, FLOOD_FILL"),
        ({"cast_strategy": {"strategy": "flod_fill"}}, InvalidOptionError, "did you mean 'FLOOD_FILL'"),
        ({"cast_strategy": 3}, InvalidOptionError, r"cast_strategy\['strategy'\].*cannot be 3"),
        ({"cast_strategy": {"level": 3}}, InvalidOptionError, "-1, 0, 1 or 2"),
        ({"cast_strategy": {"level": True}}, InvalidOptionError, "-1, 0, 1 or 2"),
        ({"cast_strategy": {"allow": "Add"}}, InvalidOptionError, "a list of ONNX operator types"),
        ({"cast_strategy": {"layer_norms": 1}}, InvalidOptionError, "expected True or False"),
        ({"cast_strategy": {"lvel": 1}}, UnknownOptionError, r"strategy\.lvel.*did you mean 'level'"),
        ({"recompute_plan": ""}, InvalidOptionError, "'recompute_plan' cannot be '': expected None, or plans as text"),
        ({"recompute_plan": ","}, InvalidOptionError, "'recompute_plan' cannot be ','"),
        ({"recompute_plan": [" "]}, InvalidOptionError, r"'recompute_plan' cannot be \[' '\]"),
        ({"recompute_plan": "layers:0"}, InvalidOptionError, "'recompute_plan' cannot be 'layers:0'"),
        ({"recompute_plan": "layers,layers:2"}, InvalidOptionError, "'layers,layers:2': expected layers once"),
        ({"recompute_plan": ["layers:2", "layers:4"]}, InvalidOptionError, "expected layers once, with one number"),
        ({"placement": torch.ones(2)}, InvalidOptionError, "'placement' cannot be tensor.*one of 'fastest'"),
        ({"cast_strategy": {"level": torch.ones(2)}}, InvalidOptionError, "-1, 0, 1 or 2"),
        ({"cache": "\ud800"}, InvalidOptionError, "'cache' cannot be .*the path of a folder"),
        ({"session_options": {"intra_op_num_threads": ""}}, InvalidOptionError, "an int >= 1"),
        ({"session_options": {"intra_op_num_threads": False}}, InvalidOptionError, "an int >= 1"),
        ({"session_options": {"intra_op_num_threads": np.float32(1.5)}}, InvalidOptionError, "cannot be np.float32"),
        ({"session_options": {"graph_optimization_level": True}}, InvalidOptionError, "expected one of 0, 1"),
    ],
)
def test_bad_options_raise_an_error_with_the_reason(options: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        parse_options(None, options)


@pytest.mark.parametrize(
    "options",
    [
        {"cast_strategy": {"strategy": PropagateCastOpsStrategy.INSERT_AND_REDUCE, "level": 2}},
        {"cast_strategy": {"strategy": "insert_and_reduce", "level": 2}},
        {"cast_strategy": {"strategy": 1, "level": 2}},
    ],
)
def test_a_cast_strategy_has_several_spellings(options: dict[str, Any]) -> None:
    expected = PassOptions(
        propagate_cast_ops_strategy=PropagateCastOpsStrategy.INSERT_AND_REDUCE, propagate_cast_ops_level=2
    )
    assert parse_options(None, options).passes == expected
    allowed = parse_options(None, {"cast_strategy": {"allow": ["Mul", "Add", "Mul"]}})
    assert allowed.passes.propagate_cast_ops_allow == ("Add", "Mul")
    alone = parse_options(None, {"cast_strategy": "none"})
    assert alone.passes.propagate_cast_ops_strategy is PropagateCastOpsStrategy.NONE


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        ("layers", RecomputeOptions(transformer_layer_recompute=True)),
        ("layers:4", RecomputeOptions(transformer_layer_recompute=True, number_recompute_layers=4)),
        ("gelu, attention_dropout", RecomputeOptions(gelu_recompute=True, attn_dropout_recompute=True)),
        (["from_inputs"], RecomputeOptions(recompute_from_inputs=True)),
        ("gelu,Tanh+:1:2", RecomputeOptions(gelu_recompute=True, recompute_plan=(Plan("Tanh+", count=2),))),
        (["gelu", Plan("Tanh+")], RecomputeOptions(gelu_recompute=True, recompute_plan=(Plan("Tanh+"),))),
        (None, RecomputeOptions()),
        ([], RecomputeOptions()),
    ],
)
def test_a_recompute_plan_names_policies_and_clusters(plan: Any, expected: RecomputeOptions) -> None:
    assert parse_options(None, {"recompute_plan": plan}).recompute == expected


def test_a_cache_is_off_on_or_a_folder(tmp_path: Path) -> None:
    found = [parse_options(None, {"cache": value}).cache for value in (None, False, True, tmp_path)]
    assert found == [
        CacheOptions(),
        CacheOptions(disk_cache=False),
        CacheOptions(disk_cache=True),
        CacheOptions(disk_cache=True, cache_dir=str(tmp_path)),
    ]


OLD: dict[str, tuple[Any, dict[str, Any]]] = {
    **{name: (True, {"debug": {name: True}}) for name in DEBUG},
    "propagate_cast_ops_strategy": ("none", {"cast_strategy": "none"}),
    "propagate_cast_ops_level": (2, {"cast_strategy": {"level": 2}}),
    "propagate_cast_ops_allow": (["Mul"], {"cast_strategy": {"allow": ["Mul"]}}),
    "allow_layer_norm_mod_precision": (True, {"cast_strategy": {"layer_norms": True}}),
    "propagate_cast_ops_config": (
        {"strategy": 1, "propagate_cast_ops_level": 2},
        {"cast_strategy": {"strategy": 1, "level": 2}},
    ),
    "attn_dropout_recompute": (True, {"recompute_plan": "attention_dropout"}),
    "gelu_recompute": (True, {"recompute_plan": "gelu"}),
    "transformer_layer_recompute": (True, {"recompute_plan": "layers"}),
    "recompute_from_inputs": (True, {"recompute_plan": "from_inputs"}),
    "intra_op_num_threads": (3, {"threads": 3}),
    "provider_options": ({"a": "b"}, {"session_options": {"provider_options": {"a": "b"}}}),
    "disk_cache": (False, {"cache": False}),
}


@pytest.mark.parametrize("name", OLD)
def test_a_name_of_an_earlier_release_works_and_names_the_new_one(name: str) -> None:
    value, new = OLD[name]
    with pytest.warns(FutureWarning, match=f"the ort_train option '{name}' is now {re.escape(DEPRECATED[name])}"):
        old = parse_options(None, {name: value})
    assert old == parse_options(None, new) != Options() or name in ("fuse", "contrib_ops", "compare_ranks")


def test_names_of_earlier_releases_without_one_option_in_their_place(tmp_path: Path) -> None:
    with pytest.warns(FutureWarning, match="is now cache=FOLDER"):
        assert parse_options(None, {"cache_dir": tmp_path}).cache == CacheOptions(cache_dir=str(tmp_path))
    with pytest.warns(FutureWarning, match='is now recompute_plan="layers:N"'):
        parsed = parse_options(None, {"recompute_plan": "layers", "number_recompute_layers": 4})
    assert parsed == parse_options(None, {"recompute_plan": "layers:4"})


def test_a_field_is_set_once() -> None:
    with (
        pytest.warns(FutureWarning, match="is now threads"),
        pytest.raises(InvalidOptionError, match="'threads' cannot be 3: expected 2, as another option has it"),
    ):
        parse_options(None, {"threads": 2, "intra_op_num_threads": 3})


def test_an_error_says_the_name_that_was_given() -> None:
    with (
        pytest.warns(FutureWarning, match="is now threads"),
        pytest.raises(InvalidOptionError, match="'intra_op_num_threads' cannot be"),
    ):
        parse_options(None, {"intra_op_num_threads": 0})


def test_onnx_runtimes_own_enumeration_is_a_strategy() -> None:
    if not installed_runtime().has_gradient_kernels:
        pytest.skip("only onnxruntime-training has it")
    theirs = binding().PropagateCastOpsStrategy.INSERT_AND_REDUCE
    parsed = parse_options(None, {"cast_strategy": theirs})
    assert parsed.passes.propagate_cast_ops_strategy is PropagateCastOpsStrategy.INSERT_AND_REDUCE


def test_an_unknown_mode_names_the_nearest() -> None:
    with pytest.raises(UnknownModeError, match="did you mean 'default'"):
        parse_options("defualt", None)
    with pytest.raises(UnknownModeError, match="no mode 1"):
        parse_options(1, None)  # type: ignore[arg-type]


def test_session_options_spell_themselves_for_the_key() -> None:
    assert repr(SessionOptions(provider_options={"a": "b"})) == (  # type: ignore[arg-type]
        "SessionOptions(graph_optimization='all', intra_op_num_threads=None, provider_options=(('a', 'b'),), "
        "session_options=(), cuda_graphs=False)"
    )


def test_session_options_are_read_as_their_differences_from_the_defaults() -> None:
    given = onnxruntime.SessionOptions()
    assert SessionOptions(session_options=given) == SessionOptions()  # type: ignore[arg-type]
    given.enable_profiling = True
    given.log_severity_level = 1
    given.execution_mode = onnxruntime.ExecutionMode.ORT_PARALLEL
    parsed = parse_options(None, {"session_options": given}).session
    assert parsed.session_options == (("enable_profiling", True), ("execution_mode", 1), ("log_severity_level", 1))
    same = {"log_severity_level": 1, "enable_profiling": True, "execution_mode": 1}
    assert parse_options(None, {"session_options": same}).session == parsed
    given.log_severity_level = 2  # the options are as they were when they were given
    assert dict(parsed.session_options)["log_severity_level"] == 1


def test_numbers_and_bools_of_numpy_are_those_of_python() -> None:
    given = {"enable_mem_pattern": np.bool_(False), "log_severity_level": np.int64(1)}
    found = parse_options(None, {"session_options": given}).session.session_options
    assert repr(found) == "(('enable_mem_pattern', False), ('log_severity_level', 1))"


def test_a_session_options_level_and_threads_are_the_options_of_these() -> None:
    given = onnxruntime.SessionOptions()
    given.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    given.intra_op_num_threads = 3
    parsed = parse_options(None, {"session_options": given, "graph_optimization": "extended"}).session
    assert parsed == SessionOptions(graph_optimization="basic", intra_op_num_threads=3)


@pytest.mark.parametrize(("level", "named"), [(0, "disable"), (1, "basic"), (2, "extended"), (99, "all")])
def test_each_level_of_a_session_is_heeded(level: int, named: str) -> None:
    parsed = parse_options(None, {"session_options": {"graph_optimization_level": level}}).session
    assert parsed.graph_optimization == named
    own = onnxruntime.SessionOptions()
    own.graph_optimization_level = onnxruntime.GraphOptimizationLevel(level)
    if level != 99:  # as a new one has it, which the option may overrule
        given = {"session_options": own, "graph_optimization": "all"}
        assert parse_options(None, given).session.graph_optimization == named


def test_debug_keys_of_later_releases_are_no_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(public, "DEBUG", (*DEBUG, "later"))
    assert public.read_options({"debug": {"later": True}}) == {"later": True}
    with pytest.raises(UnknownOptionError, match="no option 'later'"):
        public.read_options({"later": True})


PROGRAM = """
import torch

compiled = torch.compile(torch.sin, backend="ort_train", options={"gelu_recompute": True, "debug": {"fuse": False}})
compiled(torch.randn(2))
"""


@pytest.mark.parametrize("as_module", [False, True])
def test_an_old_name_is_shown_at_the_programs_line_by_default(as_module: bool, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    what = ["-c", "import program"] if as_module else ["program.py"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}
    finished = subprocess.run(
        [sys.executable, *what], cwd=tmp_path, capture_output=True, text=True, check=True, env=environment
    )
    line = "program.py:5: FutureWarning: the ort_train option 'gelu_recompute' is now recompute_plan=\"gelu\""
    assert line in finished.stderr


def test_options_of_a_session_reach_it(tmp_path: Path) -> None:
    prefix = str(tmp_path / "profile")
    options = {"session_options": {"enable_profiling": True, "profile_file_prefix": prefix}}
    torch.compile(torch.sin, backend="ort_train", options=options)(torch.randn(2))
    torch._dynamo.reset()  # drops the session, which then writes the file
    gc.collect()
    assert list(tmp_path.iterdir())


def test_plans_are_text_joined_by_commas_or_a_list_of_texts() -> None:
    compromise, off = Plan("Cast+", PlanType.RECOMPUTE_WITH_COMPROMISE, 2), Plan("Exp+", PlanType.NONE, 0)
    expected = (Plan("Gelu+Dropout+"), compromise, off)
    texts = ["Gelu+Dropout+:1:-1", "Cast+:2:2", "Exp+:0:0"]
    assert list(map(str, expected)) == texts
    for given in (",".join(texts), " ,\n ".join(["", *texts, ""]), texts, tuple(texts), list(expected)):
        assert parse_options(None, {"recompute_plan": given}).recompute.recompute_plan == expected
    for nothing in ([], None):
        assert parse_options(None, {"recompute_plan": nothing}) == Options()


def test_a_file_of_plans_enters_the_options_by_its_content(tmp_path: Path) -> None:
    path = tmp_path / "plans.json"
    path.write_text('["Gelu+:1:-1", "Cast+:2:1"]')
    inline = parse_options(None, {"recompute_plan": "Gelu+:1:-1,Cast+:2:1"})
    for given in (path, str(path)):
        assert repr(parse_options(None, {"recompute_plan": given})) == repr(inline)
    path.write_text('["Gelu+:1:1"]')
    assert repr(parse_options(None, {"recompute_plan": path})) != repr(inline)


def test_a_file_of_plans_may_have_names_as_well(tmp_path: Path) -> None:
    path = tmp_path / "plans.json"
    path.write_text('["gelu", "layers:2, Cast+:2:1"]')
    inline = parse_options(None, {"recompute_plan": ["gelu", "layers:2", "Cast+:2:1"]})
    for given in (path, str(path)):
        assert parse_options(None, {"recompute_plan": given}) == inline


@pytest.mark.parametrize("content", [b'["Gelu+:1:-1"', b'{"Gelu+": 1}', b"[1]", b'"Gelu+:1:-1"', b"\xff\xfe"])
def test_a_broken_file_of_plans_is_one_error_that_names_it(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "plans.json"
    path.write_bytes(content)
    with pytest.raises(InvalidOptionError, match=r"plans\.json': expected a JSON file with a list of plans"):
        parse_options(None, {"recompute_plan": path})
