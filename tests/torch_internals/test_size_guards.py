"""Tests of recording and replaying torch's answers about sizes."""

from __future__ import annotations

import threading

import pytest
import sympy
import torch
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ort_dynamo.torch_internals.sizes import size_guards, symbols
from ort_dynamo.torch_internals.sizes.size_guards import Fact, UnrecordedQuestionError, ask, recording, replaying

N = sympy.Symbol("s0", integer=True)


def unbacked() -> torch.SymInt:
    return ShapeEnv().create_unbacked_symint()


def test_questions_are_recorded_in_order_with_their_answers() -> None:
    size = unbacked()
    torch._check(size >= 3)
    with recording() as facts:
        assert symbols.known_true(size > 0)
        assert not symbols.known_true(size > 5)
        assert symbols.is_unbacked(size)
    assert [(fact.question, fact.answer) for fact in facts] == [
        ("known to be true", True),
        ("known to be true", False),
        ("depends on data", True),
    ]


def test_numbers_ask_nothing() -> None:
    with recording() as facts:
        assert symbols.known_true(True)
        assert symbols.is_nonnegative(3)
        assert not symbols.is_unbacked(3, 4)
        assert symbols.has_hint_of_one(1)
        assert symbols.expression(7) == 7
    assert not facts


def test_a_question_inside_a_question_is_part_of_it() -> None:
    with recording() as facts:
        assert ask("outer", (N,), lambda: ask("inner", (N,), lambda: 3)) == 3
    assert facts == [Fact("outer", (N,), 3)]
    assert not size_guards.is_watched()


def test_recorded_answers_are_given_and_others_are_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(size_guards, "strict", False)
    with replaying([Fact("big", (N,), True)]) as answered:
        assert ask("big", (N,), lambda: False)
        assert not answered.missing
        assert ask("big", (N + 1,), lambda: False) is False
    assert answered.missing == [("big", (N + 1,))]


def test_tests_do_not_take_a_missing_answer() -> None:
    with replaying([]), pytest.raises(UnrecordedQuestionError, match="big"):
        ask("big", (N,), lambda: False)


def test_threads_do_not_mix() -> None:
    seen: list[bool] = []
    with recording() as facts:
        thread = threading.Thread(target=lambda: seen.append(size_guards.is_watched()))
        thread.start()
        thread.join()
        ask("here", (N,), lambda: True)
    assert seen == [False]
    assert len(facts) == 1


def test_a_question_that_goes_past_the_door_is_an_error_in_tests() -> None:
    size = ShapeEnv().create_unbacked_symint()
    torch._check(size >= 3)
    with recording(), pytest.raises(AssertionError, match="asked torch itself"):
        bool(size > 2)


def test_symbols_have_a_kind_and_assumptions() -> None:
    size = unbacked()
    (symbol,) = symbols.given_expression(size).free_symbols
    assert symbols.kind(symbol) == "UNBACKED_INT"
    assert symbols.kind(sympy.Symbol("s3", integer=True, positive=True)) == "SIZE"
    assert symbols.assumptions(sympy.Symbol("s3", positive=True))["nonnegative"]
    assert isinstance(size.node, SymNode)
    assert symbols.hints([size, 4]) == [None, 4]
