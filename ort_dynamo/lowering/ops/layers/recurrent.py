"""Recurrent layers that reach us whole: those of a model that is not trained."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from ort_dynamo.lowering.context import LoweringContext
from ort_dynamo.lowering.recipes.promotion import float_dtype
from ort_dynamo.lowering.registry import lowering
from ort_dynamo.torch_internals.kernels.operators import aten

_LSTM = 2  # the kind of layer, in oneDNN's numbering


@lowering(aten.mkldnn_rnn_layer.default)
def mkldnn_rnn_layer(
    ctx: LoweringContext,
    input_: ir.Value,
    weight0: ir.Value,
    weight1: ir.Value,
    weight2: ir.Value,
    weight3: ir.Value,
    hx_: ir.Value,
    cx_: ir.Value,
    reverse: bool,
    batch_sizes: Sequence[int],
    mode: int,
    hidden_size: int,
    num_layers: int,
    has_biases: bool,
    bidirectional: bool,
    batch_first: bool,
    train: bool,
) -> tuple[ir.Value | None, ...]:
    """mkldnn_rnn_layer(Tensor input, Tensor weight0, Tensor weight1, Tensor weight2, Tensor weight3, Tensor hx_, Tensor cx_, bool reverse, int[] batch_sizes, int mode, int hidden_size, int num_layers, bool has_biases, bool bidirectional, bool batch_first, bool train) -> (Tensor, Tensor, Tensor, Tensor)"""  # noqa: E501
    if mode != _LSTM or num_layers != 1 or bidirectional or batch_first or batch_sizes or 3 in ctx.used:
        raise ctx.refuse("supported is one direction of one LSTM layer without packed sequences")
    op, dtype = ctx.op, float_dtype(ctx.dtype(input_))

    def gates(value: ir.Value) -> ir.Value:
        """torch's order input, forget, cell, output as ONNX's input, output, forget, cell."""
        i, f, c, o = op.Split(ctx.cast(value, dtype), num_outputs=4, axis=0, _outputs=4)
        return op.Unsqueeze(op.Concat(i, o, f, c, axis=0), [0])

    bias = op.Concat(gates(weight2), gates(weight3), axis=1) if has_biases else None
    states = [ctx.reshape(ctx.cast(state, dtype), [1, *ctx.sizes(state)[-2:]]) for state in (hx_, cx_)]
    y, h, c = op.LSTM(
        ctx.cast(input_, dtype),
        gates(weight0),
        gates(weight1),
        bias,
        None,
        *states,
        hidden_size=hidden_size,
        direction="reverse" if reverse else "forward",
        _outputs=3,
    )
    found = (op.Squeeze(y, [1]), h, c)
    shaped = [ctx.cast(ctx.reshape(one, fake.shape), fake.dtype) for one, fake in zip(found, ctx.out[:3], strict=True)]
    return *shaped, None
