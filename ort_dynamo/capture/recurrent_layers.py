"""AOTAutograd traces recurrent layers as eager computes them; they are in Dynamo's graph where `allow_rnn` is set.

torch's own decompositions differ from eager in three ways. They never apply the dropout between layers, because
`_rnn_helper` (torch/_decomp/decompositions.py) compares `num_layers < i - 1`. On a CPU they take oneDNN's operator for
an LSTM over data, whose gradient no backend can trace. And where they do not take it, but eager does, autocast casts
the matmuls of an LSTM only, not its states and results.

Those decompositions stand in tables of the process, and other threads may trace at the same time. So when this module
is imported, a kernel takes the place of each. It calls the decomposition, unless its own thread is inside
`recurrent_layers()`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ort_dynamo.capture.thread_switch import ThreadSwitch
from ort_dynamo.torch_internals.kernels.decompositions import lstm_in_steps
from ort_dynamo.torch_internals.kernels.dispatcher import replace_traced_kernels
from ort_dynamo.torch_internals.kernels.kernel_layouts import convolves_in_onednn
from ort_dynamo.torch_internals.kernels.operators import aten
from ort_dynamo.torch_internals.sizes.symbols import known_true

__all__ = ["recurrent_layers"]

_States = Tensor | Sequence[Tensor]
_Kernel = Callable[..., tuple[Tensor, ...]]
_Stack = Callable[[Tensor, _States, Sequence[Tensor], int], tuple[Tensor, ...]]
"""(data, time first; states; weights; number of layers) -> (data, time first; states): layers without dropout."""


_as_eager = ThreadSwitch()


def recurrent_layers() -> AbstractContextManager[None]:
    """Trace LSTMs, GRUs and RNNs as eager computes them, in this thread, while the context is open."""
    return _as_eager.on()


def _install() -> None:
    """Replace torch's decompositions by our kernels, permanently."""
    for packet in (aten.lstm, aten.gru, aten.rnn_tanh, aten.rnn_relu):
        replace_traced_kernels(packet.input, partial(_padded, lstm_in_steps() if packet is aten.lstm else None))
        replace_traced_kernels(packet.data, _packed)


def _padded(in_steps: _Kernel | None, original: _Kernel) -> _Kernel:
    """Make a kernel for padded sequences; `in_steps` takes the place of `original` where gradients are recorded."""

    def kernel(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        if not _as_eager.is_on or kwargs:
            return original(*args, **kwargs)
        data, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first = args
        layers = original
        if in_steps is not None:
            data, hx, params = _cast_as_onednn(data, hx, params)
            layers = in_steps if _trains(data, *hx, *params) else original

        def stack(data: Tensor, hx: _States, params: Sequence[Tensor], count: int) -> tuple[Tensor, ...]:
            return layers(data, hx, params, has_biases, count, 0.0, train, bidirectional, False)

        data = data.transpose(0, 1) if batch_first else data
        out, *final = _with_dropout(stack, data, hx, params, num_layers, dropout if train else 0.0)
        return out.transpose(0, 1) if batch_first else out, *final

    return kernel


def _packed(original: _Kernel) -> _Kernel:
    """Make a kernel for packed sequences."""

    def kernel(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        if not _as_eager.is_on or kwargs:
            return original(*args, **kwargs)
        data, batch_sizes, hx, params, has_biases, num_layers, dropout, train, bidirectional = args

        def stack(data: Tensor, hx: _States, params: Sequence[Tensor], count: int) -> tuple[Tensor, ...]:
            return original(data, batch_sizes, hx, params, has_biases, count, 0.0, train, bidirectional)

        return _with_dropout(stack, data, hx, params, num_layers, dropout if train else 0.0)

    return kernel


def _cast_as_onednn(
    data: Tensor, hx: Sequence[Tensor], params: Sequence[Tensor]
) -> tuple[Tensor, Sequence[Tensor], Sequence[Tensor]]:
    """Cast the tensors of an LSTM to autocast's dtype, if eager takes oneDNN's operator: autocast casts all of them."""
    tensors = (data, *hx, *params)
    in_onednn = (
        torch.is_autocast_enabled("cpu")
        and torch.backends.mkldnn.enabled
        and all(tensor.device.type == "cpu" for tensor in tensors)
        and data.dtype in (torch.float32, torch.bfloat16)
        and convolves_in_onednn(data.dtype)
        and hx[0].size(2) == hx[1].size(2)  # no projections
        and not known_true(data.numel() == 0)
    )
    if not in_onednn:
        return data, hx, params
    dtype = torch.get_autocast_dtype("cpu")
    return data.to(dtype), [state.to(dtype) for state in hx], [weight.to(dtype) for weight in params]


def _trains(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(one.requires_grad for one in tensors)


def _with_dropout(
    stack: _Stack, data: Tensor, hx: _States, params: Sequence[Tensor], num_layers: int, dropout: float
) -> tuple[Tensor, ...]:
    """Run layers one after the other, with dropout between them; without dropout all at once."""
    if not dropout or num_layers == 1:
        return stack(data, hx, params, num_layers)
    finals = []
    for layer in range(num_layers):
        if layer:
            data = torch.dropout(data, dropout, True) if dropout < 1 else data * data.new_zeros(())  # runs no random op
        weights = _part(params, layer, num_layers)
        states = _part(hx, layer, num_layers) if isinstance(hx, Tensor) else [_part(h, layer, num_layers) for h in hx]
        data, *final = stack(data, states, weights, 1)
        finals.append(final)
    return data, *(torch.cat(of_all) for of_all in zip(*finals, strict=True))


def _part(rows: Any, index: int, parts: int) -> Any:
    """Return the rows of one of several equal parts."""
    size = len(rows) // parts
    return rows[index * size : (index + 1) * size]


_install()
