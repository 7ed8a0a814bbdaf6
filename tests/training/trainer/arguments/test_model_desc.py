"""Section 2.4 of ORTTrainer's reference: the description of a model."""

from __future__ import annotations

import ast
import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ort_dynamo.training import model_desc_validation as md_val

INPUT_SIZE = "must be a tuple with size 2"
OUTPUT_SIZE = "must be a tuple with size 2 or 3"
NAME = "the first element of the tuple (aka name) must be a string"
SHAPE = "the second element of the tuple (aka shape) must be a list"
DIMENSION = "each shape must be either a string or integer"
LOSS = "the third element of the tuple (aka is_loss) must be a boolean"
LOSSES = "only one is_loss can bet set to True"


def message_of(model_desc: Any) -> str:
    with pytest.raises(ValueError) as caught:
        md_val._ORTTrainerModelDesc(model_desc)
    return str(caught.value)


def refused(model_desc: Any) -> Any:
    """The errors for a description that is not taken, as data."""
    prefix, text = "Invalid model_desc: ", message_of(model_desc)
    assert text.startswith(prefix)
    return ast.literal_eval(text.removeprefix(prefix).partition("\n")[0])


@pytest.mark.parametrize(
    ("model_desc", "input_dtypes", "output_dtypes"),
    [
        (
            {"inputs": [("in0", [])], "outputs": [("out0", []), ("out1", [])]},
            (torch.int,),
            (torch.float, torch.int32),
        ),
        (
            {"inputs": [("in0", ["batch", 2, 3])], "outputs": [("out0", [], True)]},
            (torch.int8,),
            (torch.int16,),
        ),
        (
            {
                "inputs": [("in0", []), ("in1", [1]), ("in2", [1000, "dyn_ax1"]), ("in3", ["dyn_ax1", "dyn_ax2"])],
                "outputs": [("out0", [], True), ("out1", [1], False), ("out2", [1, "dyn_ax1", 3])],
            },
            (torch.float, torch.uint8, torch.bool, torch.half),
            (torch.float, torch.float, torch.int64),
        ),
    ],
)
def test_a_description_becomes_named_tuples_and_gets_its_dtypes_later(
    model_desc: dict[str, Any], input_dtypes: tuple[torch.dtype, ...], output_dtypes: tuple[torch.dtype, ...]
) -> None:
    given_desc = copy.deepcopy(model_desc)
    found = md_val._ORTTrainerModelDesc(model_desc)
    for each, described in zip(found.inputs, model_desc["inputs"], strict=True):
        assert isinstance(each, found._InputDescription)
        assert each == described == (each.name, each.shape)
    for output, described in zip(found.outputs, model_desc["outputs"], strict=True):
        assert isinstance(output, found._OutputDescription)
        assert output == (described if len(described) == 3 else (*described, False))
        assert output == (output.name, output.shape, output.is_loss)
    for _ in range(2):  # the second time over the first
        for index, dtype in enumerate(input_dtypes):
            found.add_type_to_input_description(index, dtype)
        for index, dtype in enumerate(output_dtypes):
            found.add_type_to_output_description(index, dtype, torch.float16 if index == 0 else None)
    for each, described, dtype in zip(found.inputs, model_desc["inputs"], input_dtypes, strict=True):
        assert isinstance(each, found._InputDescriptionTyped)
        assert each == (*described, dtype)
    for index, (output, described) in enumerate(zip(found.outputs, model_desc["outputs"], strict=True)):
        assert isinstance(output, found._OutputDescriptionTyped)
        assert output[:2] == described[:2]
        assert (output.dtype, output.dtype_amp) == (output_dtypes[index], None if index else torch.float16)
    assert model_desc == given_desc
    assert pickle.loads(pickle.dumps(found)).outputs == found.outputs


def test_extra_descriptions_have_their_shapes_and_dtypes() -> None:
    found = md_val._ORTTrainerModelDesc({"inputs": [("x", [])], "outputs": [("y", []), ("loss", [], True)]})
    assert found.learning_rate == ("__learning_rate", [1], torch.float32)
    assert found.all_finite is found.loss_scale_input is found.gradient_accumulation is None
    found.all_finite = md_val.ALL_FINITE_IO_DESCRIPTION_NAME  # type: ignore[assignment]
    found.loss_scale_input = md_val.LOSS_SCALE_INPUT_IO_DESCRIPTION_NAME  # type: ignore[assignment]
    found.gradient_accumulation = "accumulated"  # type: ignore[assignment]
    assert found.all_finite == ("__all_finite", [1], False, torch.bool, None)
    assert found.loss_scale_input == ("__loss_scale_input_name", [], torch.float32)
    assert found.gradient_accumulation == ("accumulated", [1], False, torch.bool, None)
    assert found.loss_index == 1
    assert md_val._ORTTrainerModelDesc({"inputs": [("x", [])], "outputs": [("y", [])]}).loss_index is None
    for part in ("0: InputDescription(name='x', shape=[])", "1: OutputDescription(name='loss'", "accumulated"):
        assert part in repr(found)


@pytest.mark.parametrize(
    ("model_desc", "message"),
    [
        (
            {"inputs": [(True, [])], "outputs": [(True, [])]},
            f"{{'inputs': [{{0: ['{NAME}']}}], 'outputs': [{{0: ['{NAME}']}}]}}",
        ),
        (
            {"inputs": [("in1", None)], "outputs": [("out1", None)]},
            f"{{'inputs': [{{0: ['{SHAPE}']}}], 'outputs': [{{0: ['{SHAPE}']}}]}}",
        ),
        ({"inputs": [("in1", [])], "outputs": [("out1", [], None)]}, f"{{'outputs': [{{0: ['{LOSS}']}}]}}"),
        (
            {"inputs": [("in1", [True])], "outputs": [("out1", [True])]},
            f"{{'inputs': [{{0: ['{DIMENSION}']}}], 'outputs': [{{0: ['{DIMENSION}']}}]}}",
        ),
        (
            {"inputs": [("in1", [])], "outputs": [("out1", [], True), ("out2", [], True)]},
            f"{{'outputs': [{{1: ['{LOSSES}']}}]}}",
        ),
        (
            {"inputz": [("in1", [])], "outputs": [("out1", [], True)]},
            "{'inputs': ['required field'], 'inputz': ['unknown field']}"
            "\n'inputz' is not known (did you mean 'inputs'?)",
        ),
        (
            {"inputs": [("in1", [])], "outputz": [("out1", [], True)]},
            "{'outputs': ['required field'], 'outputz': ['unknown field']}"
            "\n'outputz' is not known (did you mean 'outputs'?)",
        ),
        ({"inputs": [], "outputs": 5}, "{'inputs': ['min length is 1'], 'outputs': ['must be of list type']}"),
        (
            {"inputs": [("in1", [], True), ["in2", []], 3], "outputs": [("out1",), "ab"]},
            f"{{'inputs': [{{0: ['{INPUT_SIZE}'], 1: ['{INPUT_SIZE}'], 2: ['{INPUT_SIZE}']}}], "
            f"'outputs': [{{0: ['{OUTPUT_SIZE}'], 1: ['{OUTPUT_SIZE}']}}]}}",
        ),
    ],
)
def test_a_refusal_has_its_old_text(model_desc: Any, message: str) -> None:
    for _ in range(2):  # losses are counted again
        assert message_of(model_desc) == f"Invalid model_desc: {message}"


@pytest.mark.parametrize(
    ("inputs", "outputs", "repeated"),
    [("ab", "cc", "'c'"), ("aa", "bc", "'a'"), ("ab", "ca", "'a'"), ("aab", "bc", "'a', 'b'")],
)
def test_a_repeated_name_is_refused(inputs: str, outputs: str, repeated: str) -> None:
    model_desc = {"inputs": [(name, []) for name in inputs], "outputs": [(name, []) for name in outputs]}
    expected = f"Invalid model_desc: give each input and output a name of its own; {repeated} is repeated"
    assert message_of(model_desc) == expected


@pytest.mark.parametrize("model_desc", [None, 5, "a", [("inputs", [])]])
def test_a_description_is_a_dict(model_desc: Any) -> None:
    assert (
        message_of(model_desc) == f"Invalid model_desc: expected a dict with 'inputs' and 'outputs', got {model_desc!r}"
    )


def test_dtypes_are_checked() -> None:
    found = md_val._ORTTrainerModelDesc({"inputs": [("x", [])], "outputs": [("y", [])]})
    for index in (-1, "0", None):
        with pytest.raises(AssertionError, match="input 'index' must be a positive int"):
            found.add_type_to_input_description(index, torch.float32)  # type: ignore[arg-type]
        with pytest.raises(AssertionError, match="output 'index' must be a positive int"):
            found.add_type_to_output_description(index, torch.float32)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match=r"input 'dtype' must be a torch.dtype type"):
        found.add_type_to_input_description(0, "float")  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match=r"output 'dtype' must be a torch.dtype type"):
        found.add_type_to_output_description(0, None)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match=r"output 'dtype_amp' must be either None or torch.dtype type"):
        found.add_type_to_output_description(0, torch.float32, "half")  # type: ignore[arg-type]
    with pytest.raises(IndexError):
        found.add_type_to_input_description(1, torch.float32)
    for name in ("", None):
        with pytest.raises(AssertionError, match="'name' is an invalid output name"):
            found.all_finite = name
        with pytest.raises(AssertionError, match="'name' is an invalid input name"):
            found.loss_scale_input = name  # type: ignore[assignment]


DIMENSIONS = st.sampled_from(["batch", "", 1, 0, 7, True, None, 1.5])
NAMES = st.sampled_from(["a", "b", "", 1, None, True])
SHAPES = st.lists(DIMENSIONS, max_size=3) | st.sampled_from([None, (), "ab", 3])
GOOD = st.tuples(st.sampled_from(["a", "b", "c"]), st.lists(st.sampled_from(["batch", 1, 7]), max_size=3))
ANY = st.one_of(
    GOOD,
    st.tuples(NAMES, SHAPES),
    st.tuples(st.sampled_from(["a", "b"]), st.just([]), st.booleans()),
    st.tuples(NAMES, SHAPES, st.sampled_from([True, False, None, 1])),
    st.sampled_from([(), ("a",), ("a", [], True, 1), None, "ab", 5, [], ["a", []], {}]),
)
DESCRIPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "inputs": st.lists(GOOD | ANY, max_size=3),
        "outputs": st.lists(GOOD | ANY, max_size=4),
        "x": GOOD,
        None: GOOD,
    },
)


def errors_of(entry: Any, is_output: bool, losses: int) -> list[str]:
    """List the errors of an input or output after `losses` losses, in the order of the messages."""
    if entry is None:
        return [OUTPUT_SIZE if is_output else INPUT_SIZE, "null value not allowed"]
    is_sequence = isinstance(entry, (tuple, list))
    sizes = (2, 3) if is_output else (2,)
    errors = [] if isinstance(entry, tuple) and len(entry) in sizes else [OUTPUT_SIZE if is_output else INPUT_SIZE]
    if is_output and is_sequence and len(entry) == 3:
        if not isinstance(entry[2], bool):
            errors.append(LOSS)
        elif losses + entry[2] > 1:
            errors.append(LOSSES)
    if is_sequence and len(entry) >= 2:
        errors += [] if isinstance(entry[0], str) else [NAME]
        errors += [] if isinstance(entry[1], list) else [SHAPE]
        shape = entry[1] if isinstance(entry[1], list) else []
        errors += [DIMENSION for size in shape if isinstance(size, bool) or not isinstance(size, (int, str))]
    return errors


def in_order(errors: Any) -> Any:
    """Errors with those of one place sorted: cerberus gives them in no particular order."""
    if isinstance(errors, dict):
        return {key: in_order(value) for key, value in errors.items()}
    return [in_order(value) for value in sorted(errors, key=str)] if isinstance(errors, list) else errors


def fuzzed(model_desc: dict[str, Any]) -> None:
    """A description is refused with exactly its errors, or accepted with exactly its entries."""
    if None in model_desc:
        assert refused(model_desc) == {None: ["unknown field"]}
        return
    errors: dict[str, Any] = {"x": ["unknown field"]} if "x" in model_desc else {}
    for field in ("inputs", "outputs"):
        entries = model_desc.get(field)
        if not entries:
            errors[field] = ["required field" if entries is None else "min length is 1"]
            continue
        wrong: dict[int, list[str]] = {}
        losses = 0
        for index, entry in enumerate(entries):
            if found := errors_of(entry, field == "outputs", losses):
                wrong[index] = found
            losses += isinstance(entry, (tuple, list)) and len(entry) == 3 and entry[2] is True
        if wrong:
            errors[field] = [wrong]
    if errors:
        assert in_order(refused(model_desc)) == in_order(errors)
        return
    names = [name for field in ("inputs", "outputs") for name, *_ in model_desc[field]]
    if len(set(names)) < len(names):
        assert "give each input and output a name of its own" in message_of(model_desc)
        return
    taken = md_val._ORTTrainerModelDesc(model_desc)
    assert taken.inputs == model_desc["inputs"]
    assert taken.outputs == [entry if len(entry) == 3 else (*entry, False) for entry in model_desc["outputs"]]
    flags = [entry[2:] == (True,) for entry in model_desc["outputs"]]
    assert taken.loss_index == (flags.index(True) if True in flags else None)


@settings(max_examples=200, derandomize=True, database=None, deadline=None)
@given(DESCRIPTIONS)
def test_a_description_is_refused_or_accepted_by_its_rules(model_desc: dict[str, Any]) -> None:
    fuzzed(model_desc)


@pytest.mark.slow
@settings(max_examples=5000, derandomize=True, database=None, deadline=None)
@given(DESCRIPTIONS)
def test_many_descriptions_are_refused_or_accepted_by_their_rules(model_desc: dict[str, Any]) -> None:
    fuzzed(model_desc)
