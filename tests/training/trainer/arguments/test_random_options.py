"""Sections 2.1 and 2.2 of ORTTrainer's reference: random options, good and bad."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from options_table import DOCUMENTED, OPTIONS, SCALER, SCHEDULER, SESSION_OPTIONS, defaults, put, refused

from ort_dynamo import ORTTrainerOptions, PropagateCastOpsStrategy


def fuzzed(data: st.DataObject) -> None:
    """Random options are valid, invalid, misspelt or as in the documents; the result agrees with the table."""
    given_options: dict[str, Any] = {}
    errors: dict[str, Any] = {}
    expected = defaults()
    for path in data.draw(st.lists(st.sampled_from(sorted(OPTIONS)), unique=True, max_size=12)):
        _, good, bad = OPTIONS[path]
        fate = data.draw(st.sampled_from(["good", "good", "documented", "bad", "misspelt"]))
        if fate == "misspelt":
            put(given_options, f"{path}_", data.draw(st.sampled_from([*good, None])))
            put(errors, f"{path}_", ["unknown field"], around=lambda level: [level])
        elif fate == "bad":
            value, error = data.draw(st.sampled_from(bad))
            put(given_options, path, value)
            put(errors, path, [error] if isinstance(error, str) else error, around=lambda level: [level])
        else:
            value = data.draw(st.sampled_from(good))
            put(given_options, DOCUMENTED.get(path, path) if fate == "documented" else path, value)
            put(expected, path, value)
    if errors:
        assert refused(given_options) == errors
    else:
        expected["distributed"]["data_parallel_size"] = expected["distributed"]["world_size"]
        assert ORTTrainerOptions(given_options)._validated_opts == expected


WORDS = sorted({word for path in (*OPTIONS, *DOCUMENTED.values()) for word in path.split(".")})
LEAVES = st.sampled_from([None, True, 0, 1, -1, 1.5, "cuda", b"", (), len, SCALER, SCHEDULER, SESSION_OPTIONS])
KEYS = [0, 1, None, 1.5, (), b"a", PropagateCastOpsStrategy.NONE]
JUNK = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(WORDS) | st.text(max_size=2) | st.sampled_from(KEYS), inner, max_size=3)
    ),
    max_leaves=12,
)


def fuzzed_with_junk(options: Any) -> None:
    """Check that options are refused as documented, or become a full set that is valid again."""
    try:
        found = ORTTrainerOptions(options)
    except ValueError as error:
        assert str(error).startswith(("Invalid options: ", "Loss Scaler cannot be specified"))  # noqa: PT017
        return
    assert found._validated_opts.keys() == defaults().keys()
    assert ORTTrainerOptions(found._validated_opts)._validated_opts == found._validated_opts


@settings(max_examples=200, derandomize=True, database=None, deadline=None)
@given(st.data())
def test_options_agree_with_the_table(data: st.DataObject) -> None:
    fuzzed(data)


@pytest.mark.slow
@settings(max_examples=5000, derandomize=True, database=None, deadline=None)
@given(st.data())
def test_many_options_agree_with_the_table(data: st.DataObject) -> None:
    fuzzed(data)


@settings(max_examples=200, derandomize=True, database=None, deadline=None)
@given(JUNK)
def test_junk_is_refused_or_taken(options: Any) -> None:
    fuzzed_with_junk(options)


@pytest.mark.slow
@settings(max_examples=5000, derandomize=True, database=None, deadline=None)
@given(JUNK)
def test_much_junk_is_refused_or_taken(options: Any) -> None:
    fuzzed_with_junk(options)
