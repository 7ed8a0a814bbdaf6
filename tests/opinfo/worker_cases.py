"""Cases for test_workers.py, in a module of their own that the processes import."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from functools import partial

from workers import ENDS_ITS_PROCESS, Case, Verdict

__all__ = ["cases_of", "fails", "prepare"]


def prepare() -> None:
    os.environ["PREPARED"] = "yes"


def fails() -> None:
    raise RuntimeError("a dependency is missing")


def cases_of(job: str) -> Iterator[Case]:
    """One case for each letter of the job."""
    for letter in job:
        if letter == "?":
            raise RuntimeError("this job has no such case")
        yield partial(case, letter)


def case(letter: str) -> Verdict:
    if letter == "d":
        os._exit(7)
    if letter == "h":
        time.sleep(600)
    found: Verdict = {"kind": letter, "process": os.getpid(), "prepared": os.environ["PREPARED"]}
    return {**found, ENDS_ITS_PROCESS: True} if letter == "l" else found
