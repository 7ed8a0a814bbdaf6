"""Record torch's answers about sizes while a node is lowered, so that the key of a graph can hold them.

A lowering sees more of a symbolic size than its expression: whether a guard makes it positive, whether two sizes are
known to be equal, how a product of sizes simplified. Two graphs alike in everything but these facts may become two
different models. `symbols.py` passes every such question through `ask`. The first lowering of a node, alone and on
trial, runs under `recording`; its questions enter the key. The lowering of the whole graph runs under `replaying`
these records, and so is decided by the content of the key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

__all__ = [
    "SIZE_FACTS",
    "Fact",
    "RecordedFacts",
    "UnrecordedQuestionError",
    "ask",
    "is_watched",
    "recording",
    "replaying",
]

SIZE_FACTS = "ort_dynamo.size_facts"
"""The key of a node's meta for the facts that a probe of its lowering recorded: a tuple of Fact."""

_T = TypeVar("_T")


class UnrecordedQuestionError(AssertionError):
    """A graph's lowering asked a question that none of its nodes asked when lowered alone."""


class Fact(NamedTuple):
    """One answer about sizes.

    Attributes:
        question: the question, in words.
        about: expressions of the sizes it was asked about.
        answer: None, a bool, an int, or a tuple of ints. None also where reading `about` is all that was done.
    """

    question: str
    about: tuple[Any, ...]
    answer: Any


@dataclass
class _Recording:
    """Keeps each question and its answer, in order."""

    facts: list[Fact] = field(default_factory=list)

    def ask(self, question: str, about: tuple[Any, ...], answer: Callable[[], _T]) -> _T:
        found = _unwatched(answer)
        self.facts.append(Fact(question, about, found))
        return found


@dataclass
class RecordedFacts:
    """Answers from facts.

    Attributes:
        known: question and its subject -> answer.
        missing: questions that were asked and are not among the facts.
        strict: raise at the first of them.
    """

    known: dict[tuple[str, tuple[Any, ...]], Any]
    missing: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    strict: bool = False

    def ask(self, question: str, about: tuple[Any, ...], answer: Callable[[], _T]) -> _T:
        """Return the known answer, or torch's, which is noted as missing."""
        if (question, about) in self.known:
            known: _T = self.known[question, about]
            return known
        if self.strict:
            raise UnrecordedQuestionError(f"{question}, of {about}, was not asked by a node lowered alone")
        self.missing.append((question, about))
        return _unwatched(answer)


_watcher: ContextVar[_Recording | RecordedFacts | None] = ContextVar("ort_dynamo size facts", default=None)

strict = False
"""Make a question without a recorded answer an error. Tests set it; otherwise the graph is not kept for reuse."""


def ask(question: str, about: tuple[Any, ...], answer: Callable[[], _T]) -> _T:
    """Return the answer to a question about sizes, recorded or looked up where this thread does so; else `answer()`.

    Args:
        question: the question, in words.
        about: expressions of the sizes it is about, with everything else that the question depends on.
        answer: asks torch. Questions asked in there are part of this one.
    """
    watcher = _watcher.get()
    return answer() if watcher is None else watcher.ask(question, about, answer)


def is_watched() -> bool:
    """Check whether questions of this thread are being recorded or answered from records, outside of `ask`."""
    return _watcher.get() is not None


@contextmanager
def recording() -> Iterator[list[Fact]]:
    """Record the questions that this thread asks, into the list that is given."""
    recorder = _Recording()
    token = _watcher.set(recorder)
    try:
        yield recorder.facts
    finally:
        _watcher.reset(token)


@contextmanager
def replaying(facts: Iterable[Fact]) -> Iterator[RecordedFacts]:
    """Answer the questions that this thread asks from `facts`, and note those that are not among them."""
    known: dict[tuple[str, tuple[Any, ...]], Any] = {}
    for fact in facts:
        known.setdefault((fact.question, fact.about), fact.answer)
    recorded = RecordedFacts(known, strict=strict)
    token = _watcher.set(recorded)
    try:
        yield recorded
    finally:
        _watcher.reset(token)


def _unwatched(answer: Callable[[], _T]) -> _T:
    token = _watcher.set(None)
    try:
        return answer()
    finally:
        _watcher.reset(token)
