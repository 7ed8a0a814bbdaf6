"""torch's formulas in Python for its operators."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ort_dynamo.torch_internals.kernels.operators import OpOverload, is_mutable
from ort_dynamo.torch_internals.lookup import private

__all__ = [
    "core_decompositions",
    "decompositions_of",
    "linspace",
    "lstm_in_steps",
    "prim_function",
    "prim_functions",
    "resized_lengths",
]

_core = private("torch._decomp:core_aten_decompositions", lambda: torch.export.default_decompositions())
_decompositions_of = private("torch._decomp:get_decompositions", lambda overloads: {})
_prims = private("torch._prims")
_linspace = private("torch._refs:linspace", torch.linspace)
_formulas = private("torch._decomp.decompositions")
_resized_lengths = private("torch._decomp.decompositions:upsample_compute_output_size")


def core_decompositions() -> dict[Any, Callable[..., Any]]:
    """Operator -> its decomposition into core ATen. Without torch's function, the table that torch.export uses."""
    return dict(_core())


def decompositions_of(overloads: Iterable[OpOverload]) -> dict[Any, Callable[..., Any]]:
    """Overload -> its decomposition, of those that have one; without torch's function none, and they stay whole."""
    return dict(_decompositions_of(tuple(overloads)))


def prim_functions() -> dict[OpOverload, Callable[..., Any]]:
    """Functional prim -> the ATen function that torch itself runs for it; without torch's module, or a prim's
    function, the prim stays whole and runs in eager."""
    found = (value for value in (vars(_prims) if _prims else {}).values() if isinstance(value, OpOverload))
    functions = {prim: getattr(prim, "impl_aten", None) for prim in found if not is_mutable(prim)}
    return {prim: function for prim, function in functions.items() if function is not None}


def prim_function(target: object) -> Callable[..., Any] | None:
    """Return the ATen function that torch itself runs for a prim, inductor's included; None of any other operator."""
    is_prim = isinstance(target, OpOverload) and target.namespace in ("inductor_prims", "prims")
    return getattr(target, "impl_aten", None) if is_prim else None


def linspace(start: Any, end: Any, steps: int, **place: Any) -> torch.Tensor:
    """torch's decomposition of torch.linspace; without it, the operator itself, which then runs in eager."""
    found: torch.Tensor = _linspace(start, end, steps, **place)
    return found


def lstm_in_steps() -> Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]] | None:
    """torch.lstm of padded sequences as torch takes it apart, one step after the other; None where torch does not.

    torch's own choice (lstm_impl in torch/_decomp/decompositions.py) is oneDNN's operator wherever the input needs no
    gradient, though the weights may: that one's gradient cannot be traced.
    """
    if not all(hasattr(_formulas, name) for name in ("gather_params", "_rnn_helper", "one_layer_lstm")):
        return None

    def lstm(
        data: torch.Tensor,
        hx: Sequence[torch.Tensor],
        params: Sequence[torch.Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        hidden, cell = hx
        weights = _formulas.gather_params(params, has_biases, hidden.size(2) != cell.size(2))
        states = list(zip(hidden, cell, strict=True))
        settings = (has_biases, num_layers, dropout, train, bidirectional, batch_first)
        out, final = _formulas._rnn_helper(data, states, weights, *settings, _formulas.one_layer_lstm)
        hiddens, cells = zip(*final, strict=True)
        # torch 2.11 leaves an axis of one in the final states, or takes away that of a batch of one.
        return out, torch.stack(hiddens).reshape(hidden.shape), torch.stack(cells).reshape(cell.shape)

    return lstm


def resized_lengths(
    shape: Sequence[int], output_size: Sequence[int] | None, factors: Sequence[float] | None
) -> Sequence[int]:
    """Return the spatial lengths of a resize, from its output size or its scale factors; one of them is given.

    If torch lacks its function (upsample_compute_output_size in all tested versions), the same formula is used.
    """
    if _resized_lengths is not None:
        found: Sequence[int] = _resized_lengths(shape, output_size, factors)
        return found
    if output_size is not None:
        return output_size
    assert factors is not None
    return [int(size * factor) for size, factor in zip(shape[2:], factors, strict=True)]
