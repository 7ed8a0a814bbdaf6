"""The demo's data, from installed sources: scikit-learn's digits and the source of Python's library."""

from __future__ import annotations

import importlib.util
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ort_dynamo.errors import MissingPackageError

__all__ = [
    "Digits",
    "check_packages",
    "digit_batches",
    "load_digits",
    "read_library_text",
    "text_batches",
]


def check_packages(packages: dict[str, str]) -> None:
    """Raise MissingPackageError for those of `packages` (import name -> distribution) that are not installed."""
    missing = [distribution for name, distribution in packages.items() if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingPackageError(missing=" and ".join(missing))


@dataclass(frozen=True)
class Digits:
    """scikit-learn's 1797 handwritten digits, one in five kept for the test.

    Attributes:
        images, test_images: (count, 1, 8, 8) float32 in [0, 1].
        labels, test_labels: (count,) int64 in 0 … 9.
    """

    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def load_digits(generator: torch.Generator) -> Digits:
    """Return the digits, split at random."""
    from sklearn import datasets

    bunch = datasets.load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(bunch.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=generator)
    test, train = order[: len(order) // 5], order[len(order) // 5 :]
    return Digits(images[train], labels[train], images[test], labels[test])


def digit_batches(digits: Digits, size: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """(images, labels) of `size` each, without end; every epoch in a new order, its incomplete last batch dropped."""
    while True:
        order = torch.randperm(len(digits.labels), generator=generator)
        for chosen in order[: len(order) // size * size].view(-1, size):
            yield digits.images[chosen], digits.labels[chosen]


def read_library_text(limit: int) -> Tensor:
    """Return the first `limit` bytes of the *.py files of Python's standard library, in order of their names, as uint8.

    Raises:
        FileNotFoundError: this Python keeps its library elsewhere (a zip file, or compiled only).
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit:
            break
    if not text:
        raise FileNotFoundError(f"the GPT of the demo trains on the source of Python's library; {folder} has no *.py")
    return torch.frombuffer(text[:limit], dtype=torch.uint8)


def text_batches(text: Tensor, size: int, context: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """(tokens, targets), each (size, context) int64, without end; the targets are the tokens one place later."""
    window = torch.arange(context + 1)
    while True:
        starts = torch.randint(len(text) - context, (size, 1), generator=generator)
        tokens = text[starts + window].long()
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
