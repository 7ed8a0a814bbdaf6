"""Values that parsing cannot judge: the compile refuses them before it traces a graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed

from ort_dynamo.errors import InvalidOptionError


def test_an_unknown_attribute_of_a_session_is_refused_at_the_compile() -> None:
    compiled = torch.compile(torch.sin, backend="ort_train", options={"session_options": {"enable_profilng": True}})
    said = (
        r"option 'session_options': SessionOptions of onnxruntime\S* \S+ has no attribute 'enable_profilng' "
        r"\(did you mean 'enable_profiling'\?\)"
    )
    with pytest.raises(BackendCompilerFailed, match=said) as raised:
        compiled(torch.randn(2))
    assert isinstance(raised.value.inner_exception, InvalidOptionError)


def test_an_attribute_that_resembles_none_is_refused_with_all_names() -> None:
    compiled = torch.compile(torch.sin, backend="ort_train", options={"session_options": {"zzz": 1}})
    with pytest.raises(BackendCompilerFailed, match=r"no attribute 'zzz'; it has .*intra_op_num_threads"):
        compiled(torch.randn(2))


def test_an_unknown_option_of_the_provider_is_named() -> None:
    options = {"session_options": {"provider_options": {"nope": "1"}}}
    with pytest.raises(BackendCompilerFailed, match="CPUExecutionProvider has no option 'nope'") as raised:
        torch.compile(torch.sin, backend="ort_train", options=options)(torch.randn(2))
    assert isinstance(raised.value.inner_exception, InvalidOptionError)


@pytest.mark.parametrize(("name", "value"), [("optimized_model_filepath", True), ("log_severity_level", True)])
def test_an_attribute_of_a_session_is_not_converted_to_another_value(name: str, value: Any) -> None:
    compiled = torch.compile(torch.sin, backend="ort_train", options={"session_options": {name: value}})
    with pytest.raises(BackendCompilerFailed, match=f"{name}.* cannot be True: expected") as raised:
        compiled(torch.randn(2))
    assert isinstance(raised.value.inner_exception, InvalidOptionError)


def test_a_folder_below_the_home_of_nobody_is_refused() -> None:
    compiled = torch.compile(torch.sin, backend="ort_train", options={"cache": "~nobody-has-this-name/cache"})
    with pytest.raises(BackendCompilerFailed, match="'cache' cannot be '~nobody-has-this-name/cache'"):
        compiled(torch.randn(2))


@pytest.mark.parametrize("option", ["save_onnx", "cache"])
@pytest.mark.parametrize("below", [".", "folder"])
def test_a_folder_that_cannot_be_written_is_refused_with_the_option(below: str, option: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / below
    compiled = torch.compile(torch.sin, backend="ort_train", options={option: folder})
    with pytest.raises(BackendCompilerFailed, match=f"'{option}' cannot be '{folder}': ") as raised:
        compiled(torch.randn(2))
    inner = raised.value.inner_exception
    assert isinstance(inner, InvalidOptionError)
    assert isinstance(inner, OSError)
    assert isinstance(inner.__cause__, OSError)
