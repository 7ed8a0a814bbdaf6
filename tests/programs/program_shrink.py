"""Shrink a failing program: drop parts that are not needed for the same failure, with a limit of tries."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from program_comparison import Case, check
from program_text import Line

__all__ = ["shrink"]

_PLAIN = {"after": "", "channels_last": False, "training": False, "backward": "once", "dtype": "float32"}

_TIED_OR_FROZEN = re.compile(r"^(?:tied\()?(nn\..*?)(?:, self\.p\d+\)|\.requires_grad_\(False\))$")
"""A part that shares a weight or is frozen, and in it the plain one."""


def shrink(case: Case, kind: str, tries: int = 80) -> Case:
    """Return the smallest case found whose gravest difference is of the same kind.

    Args:
        tries: how many programs are compiled at most.
    """
    seen: set[str] = set()
    while True:
        for candidate in _smaller(case):
            text = candidate.text()
            if text in seen:
                continue
            seen.add(text)
            if not _eager_takes(candidate):
                continue
            tries -= 1
            if tries < 0:
                return case
            if _fails(candidate, kind):
                case = candidate
                break
        else:
            return case


def _eager_takes(case: Case) -> bool:
    found = case.observe()
    return found.raised is None or found.raised.stage != "forward"


def _fails(case: Case, kind: str) -> bool:
    state, found = check(case)
    return state == "wrong" and found[0].kind == kind


def _smaller(case: Case) -> Iterator[Case]:
    """Yield cases with one thing less, those first that take most away."""
    program = case.program
    for result in dict.fromkeys(program.results):
        if len(program.results) > 1 and not program.after:
            yield _with(case, results=(result,))
    for index in range(len(program.results)):
        rest = (*program.results[:index], *program.results[index + 1 :])
        if rest:
            yield _with(case, results=rest)
    unread = program.without_unread()
    if unread != program:
        yield replace(case, program=unread.pruned())
    for index in reversed(range(len(program.body))):
        yield _with(case, body=(*program.body[:index], *program.body[index + 1 :]))
        yield from _bypassed(case, index)
    for region in dict.fromkeys(line.region for line in program.body if line.region):
        freed = tuple(replace(line, region="" if line.region == region else line.region) for line in program.body)
        yield _with(case, body=freed)
    if case.setting != "default":
        yield replace(case, setting="default")
    if case.batches:
        yield replace(case, batches=case.batches[:-1])
    for name, text in program.parts.items():
        simple = _TIED_OR_FROZEN.sub(r"\1", text)
        if simple != text:
            yield _with(case, parts={**program.parts, name: simple})
    for plain in (*({name: value} for name, value in _PLAIN.items()), {"loss": "sum"}):
        if any(getattr(program, name) != value for name, value in plain.items()):
            yield _with(case, **plain)
    for index, given in enumerate(program.inputs):
        for simple in (
            replace(given, layout="contiguous"),
            replace(given, copied=False),
            replace(given, differentiable=False),
        ):
            if simple != given:
                yield _with(case, inputs=(*program.inputs[:index], simple, *program.inputs[index + 1 :]))


def _with(case: Case, **changed: object) -> Case:
    return replace(case, program=replace(case.program, **changed).pruned())  # type: ignore[arg-type]


def _bypassed(case: Case, index: int) -> Iterator[Case]:
    """Drop a line whose readers read one of its own operands instead."""
    program = case.program
    line = program.body[index]
    if len(line.made) != 1:
        return
    name = re.compile(rf"\b{line.made[0]}\b")
    for operand in sorted(line.reads()):
        body = [*program.body[:index]]
        body += [Line(name.sub(operand, one.text), one.made, one.region) for one in program.body[index + 1 :]]
        yield _with(case, body=tuple(body), results=tuple(name.sub(operand, one) for one in program.results))
