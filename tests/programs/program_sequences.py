"""Ingredients of sequences: recurrent cells and layers, attention, layers of transformers."""

from __future__ import annotations

from program_draft import Draft, call, ingredient
from torch import Tensor


@ingredient(2, 2)
def recurrent_cell(draft: Draft, a: str, value: Tensor) -> str | tuple[str, int]:
    width = value.shape[1]
    kind = draft.pick(("GRUCell", "RNNCell", "LSTMCell"))
    cell = draft.part(call(f"nn.{kind}", width, width, bias=draft.chance(0.8)))
    if kind == "LSTMCell":
        return (f"{cell}({a})", 2) if draft.chance(0.5) else (f"{cell}({a}, {cell}({a}))", 2)
    state = draft.alike(a, value.shape)
    return f"{cell}({a}, {state or f'{cell}({a})'})"


@ingredient(2, 3)
def recurrent_steps(draft: Draft, a: str, value: Tensor) -> str | None:
    """A cell over the first steps of a sequence, as a loop."""
    if value.shape[1] < 2:
        return None
    cell = draft.part(call(f"nn.{draft.pick(('GRUCell', 'RNNCell'))}", value.shape[2], draft.pick((4, 8))))
    return f"{cell}({a}[:, 1], {cell}({a}[:, 0]))"


@ingredient(0.7, 3)
def recurrent_layer(draft: Draft, a: str, value: Tensor) -> str:
    given = draft.pick(({}, {"bidirectional": True}, {"num_layers": 2}))
    layer = draft.part(call(f"nn.{draft.pick(('GRU', 'LSTM', 'RNN'))}", value.shape[2], 4, batch_first=True, **given))
    return f"{layer}({a})[0]"


@ingredient(2, 3)
def attention_layer(draft: Draft, a: str, value: Tensor) -> str:
    width = value.shape[2]
    heads = draft.pick([heads for heads in (1, 2, 4) if width % heads == 0])
    key = draft.alike(a, value.shape) or a
    if draft.chance(0.3):
        given = {"norm_first": draft.chance(0.5), "activation": draft.pick(("relu", "gelu"))}
        layer = draft.part(call("nn.TransformerEncoderLayer", width, heads, 8, 0.1, batch_first=True, **given))
        return f"{layer}({a})"
    layer = draft.part(call("nn.MultiheadAttention", width, heads, dropout=draft.pick((0.0, 0.2)), batch_first=True))
    return f"{layer}({a}, {key}, {key}, need_weights={draft.chance(0.3)})[0]"


@ingredient(1.5, 3, 4)
def masked_attention(draft: Draft, a: str, value: Tensor) -> str:
    length = value.shape[-2]
    mask = draft.pick(
        (
            f"torch.ones({length}, {length}, dtype=torch.bool).tril()",
            f"torch.linspace(-1, 1, {length}, dtype={a}.dtype)",
            f"{a}.mean(-1).unsqueeze(-2)",
            f"{a}.detach().mean(-1).unsqueeze(-2) > 0",  # rows without a key
        )
    )
    dropout = draft.pick(("", "", ", dropout_p=0.2"))
    return f"F.scaled_dot_product_attention({a}, {a}, {draft.alike(a, value.shape) or a}, {mask}{dropout})"


@ingredient(1, 3)
def positions(draft: Draft, a: str, value: Tensor) -> str:
    table = draft.part(call("nn.Embedding", 16, value.shape[2]))
    return f"{a} + {table}(torch.arange({a}.shape[1]))"
