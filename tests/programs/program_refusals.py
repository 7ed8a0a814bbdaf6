"""Lines that eager refuses: for shapes and dtypes, for writes, and for numbers that only a run knows."""

from __future__ import annotations

import re

from program_draft import Draft
from torch import Tensor

__all__ = ["REFUSALS", "has_refused_numbers", "refused"]

_BY_SHAPE = (
    "{a}.select(-1, 99)",
    "{a}.reshape(-1, 7919)",
    "{a} @ {a}.new_ones(7919, 2)",
    "torch.cat([{a}, {a}[..., None]], -1)",
    "{a} + {a}.new_ones(7919)",
    "F.linear({a}, {a}.new_ones(3, 7919))",
    "F.linear({a}, torch.ones(3, {a}.shape[-1], dtype=torch.int64))",
    "{a}.transpose(0, 9)",
    "{a}.narrow(0, 0, 99)",
    "F.dropout({a}, 1.5)",
    "{a}.split([1, 7919], -1)[0]",
    "torch.stack([{a}, {a}.flatten()])",
    "{a}.long().mean()",
)
_BY_WRITES = (
    "{a}.add_({a}.new_ones(2, *{a}.shape))",
    "{a}[..., :1].expand({a}.shape[0], *[-1] * ({a}.dim() - 1), 3).mul_(2)",
    "{a}.detach().requires_grad_().add_(1)",
    "{a}.new_ones(3).expand(2, 3).add_(1)",
    "{a}.long().add_(0.5)",
)
_BY_NUMBERS = (
    "{a}.gather(-1, ({a} * 0).long() + 99)",
    "{a}.index_select(0, torch.tensor([99]))",
    "{a}[({a}.flatten()[:1] * 0).long() + 99]",
    "{a}.index_add(0, torch.tensor([99]), {a}[:1])",
    "{a}.scatter(0, ({a}[:1] * 0).long() + 99, 1.0)",
    "F.embedding(({a} * 0).long() + 99, torch.ones(3, 2))",
    "F.embedding(({a} * 0).long() - 1, torch.ones(3, 2))",
    "F.one_hot(({a} * 0).long() + 3, 2)",
    "F.one_hot(({a} * 0).long() - 1)",
    "F.cross_entropy({a}.reshape({a}.shape[0], -1), torch.full(({a}.shape[0],), 9999))",
    "F.nll_loss({a}.reshape({a}.shape[0], -1), torch.full(({a}.shape[0],), -3))",
    "{a}.long() // ({a} * 0).long()",
    "{a}.long() % ({a} * 0).long()",
    "{a}.long() ** (({a} * 0).long() - 1)",
    "torch.bernoulli({a}.abs() + 9)",
    "torch.linalg.cholesky(-torch.eye(2) * {a}.abs().amax().float())",
    "{a}.repeat_interleave(({a}.flatten()[:1] * 0).long() - 1, 0)",
    "torch.multinomial({a}.flatten()[:2].abs() * 0, 1)",
    "{a}.take(({a} * 0).long() + 99999)",
    "{a}.put(({a} * 0).long() + 99999, {a})",
    "torch.bincount(({a}.flatten() * 0).long() - 1)",
    "{a}.masked_scatter({a}.isfinite(), {a}.flatten()[:0])",
    "{a}.quantile(1 + {a}.abs().amax())",
)


REFUSALS = (*_BY_SHAPE, *_BY_WRITES, *_BY_NUMBERS)


def has_refused_numbers(text: str) -> bool:
    """Check for a line that eager's kernels for a CPU refuse for its numbers; those for CUDA assert, or compute."""
    patterns = (re.escape(line).replace(re.escape("{a}"), r"\w+") for line in _BY_NUMBERS)
    return any(re.search(pattern, text) for pattern in patterns)


def refused(draft: Draft, a: str, value: Tensor) -> str:
    """Return an expression which eager refuses for most values."""
    return draft.pick(draft.pick((_BY_SHAPE, _BY_WRITES, _BY_NUMBERS, _BY_NUMBERS))).format(a=a)
