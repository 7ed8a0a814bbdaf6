"""Ingredients of dtypes (casts, integers, masks, indices), sizes (empty, or read by the program) and randomness."""

from __future__ import annotations

from program_draft import Draft, call, ingredient
from torch import Tensor

FLOATS = ("bfloat16", "float16", "float64", "float64", "float32")


@ingredient(2)
def cast(draft: Draft, a: str, value: Tensor) -> str:
    dtype = draft.pick(FLOATS)
    return draft.pick(
        (
            f"{a}.to(torch.{dtype}).to({a}.dtype)",
            f"{a}.to(torch.{dtype}).softmax(-1).to({a}.dtype)",
            f"{a} + {a}.to(torch.{dtype})",
            f"{a}.to(torch.{dtype})",
            f"{a}.sum(-1, dtype=torch.float64).to({a}.dtype)",
        )
    )


@ingredient(3)
def integers_of_floats(draft: Draft, a: str, value: Tensor) -> str:
    forms = (
        f"{a} > 0.2",
        f"{a} <= {a}.flip(-1)",
        f"{a}.argmax(-1)",
        f"{a}.max(-1)[1]",
        f"({a} * 4).long()",
        f"{a}.bool()",
    )
    return draft.pick((*forms, f"({a} * 3).to(torch.int32)", f"{a}.isnan()", f"{a}.argsort(-1, stable=True)"))


@ingredient(3, *range(5), integers=True)
def integer_arithmetic(draft: Draft, a: str, value: Tensor) -> str:
    forms = [
        f"{a} + 1",
        f"{a} * 2",
        f"{a}.long() % 3",
        f"{a}.long() // 2",
        f"{a}.int() - 1",
        f"{a} == 1",
        f"{a}.to(torch.uint8)",
    ]
    forms += [
        f"~({a} > 1)",
        f"{a}.long() << 1",
        f"{a}.long() & 3",
        f"{a}.long().clamp(0, 2)",
        f"{a} / 2",
        f"{a}.float()",
    ]
    if value.dim():
        forms += [f"{a}.sum(-1)", f"{a}.long().cumsum(-1)", f"{a}.amax(-1)", f"{a}.flip(-1)", f"{a}.any(-1)"]
        forms += [
            f"{a}.long().sort(-1, stable=True)[0]",
            f"{a}[..., 1:]",
            f"{a}.unsqueeze(-1)",
            f"torch.stack([{a}, {a}])",
        ]
    return draft.pick(forms)


@ingredient(4, *range(5), integers=True)
def floats_of_integers(draft: Draft, a: str, value: Tensor) -> str | None:
    b = draft.alike(a, value.shape)
    forms = [f"{draft.part(call('nn.Embedding', 9, draft.pick((4, 8))))}({a}.long() % 9)"] * 3
    forms += [f"F.one_hot({a}.long() % 5, 5) * 0.5"]
    if b:
        forms += [
            f"{a}.to({b}.dtype)",
            f"{a} * {b}",
            f"{b}.masked_fill({a} > 0, 0.1)",
            f"torch.where({a} > 1, {b}, 0.3)",
        ]
        forms += [f"{b}.gather(-1, {a}.long() % {b}.shape[-1])"] * (value.dim() > 0)
    other = draft.other(a, lambda value: value.dim() > 1)
    if other:
        chosen = f"{a}.flatten().long() % {other}.shape[1]"
        forms += [f"{other}.index_select(1, {chosen})", f"{other}[:, {chosen}]"]
        forms += [f"torch.zeros_like({other}).index_add(1, {chosen}, {other}.index_select(1, {chosen}))"]
        forms += [f"{other}.index_fill(1, {chosen}, 0.3)"]
    return draft.pick(forms)


@ingredient(1)
def empty_part(draft: Draft, a: str, value: Tensor) -> str:
    dim = draft.choose.randrange(value.dim())
    empty = draft.pick((f"{a}.narrow({dim}, 0, 0)", f"{a}[..., :0]", f"{a}[{value.shape[0]}:]", f"{a}[..., 1:1]"))
    return draft.pick(
        (empty, f"torch.cat([{empty}, {a}], {draft.pick((dim, -1, 0))})", f"{empty}.sum({dim})", f"{empty}.sum()")
    )


@ingredient(2)
def size(draft: Draft, a: str, value: Tensor) -> str:
    forms = [f"{a} * {a}.shape[0] / 4", f"{a} + torch.arange({a}.shape[-1]) / 8", f"{a}[..., : {a}.shape[-1] // 2 + 1]"]
    forms += [f"{a}.new_ones({a}.shape[0], {a}.shape[-1]) / {a}.shape[-1]", f"{a} + {a}.numel() / 1000"]
    forms += [f"{a}.reshape({a}.shape[-1], -1)", f"{a}.repeat_interleave(2, -1)", f"F.pad({a}, (0, {a}.shape[0]))"]
    if value.dim() == 4:
        forms += [f"F.interpolate({a}, size=({a}.shape[2] + 1, {a}.shape[3] * 2))"]
    return draft.pick(forms)


@ingredient(1.5)
def scalar(draft: Draft, a: str, value: Tensor) -> str:
    b = draft.alike(a, value.shape)
    forms = [f"{a}.mean()", f"{a}.square().mean().sqrt() + {a}", f"{a}.amax()", f"{a}.std()", f"{a}.mean().reshape(1)"]
    forms += [f"F.mse_loss({a}, {b})", f"F.smooth_l1_loss({a}, {b})"] * 2 if b else []
    if value.dim() == 2:
        forms += [f"F.cross_entropy({a}, torch.arange({a}.shape[0]) % {a}.shape[1])"] * 2
    return draft.pick(forms)


@ingredient(3, 0)
def of_scalar(draft: Draft, a: str, value: Tensor) -> str | None:
    b = draft.other(a, lambda value: value.dim() > 0)
    return draft.pick((f"{b} * {a}", f"{a} + {b}", f"{a}.expand_as({b})", f"{b} - {a}")) if b else f"{a}.tanh()"


@ingredient(1.5)
def random_numbers(draft: Draft, a: str, value: Tensor) -> str:
    """Draw in float32: in another dtype the numbers are others."""
    return draft.pick(
        (
            f"{a} + 0.1 * torch.randn_like({a}, dtype=torch.float32).to({a}.dtype)",
            f"{a} * torch.rand({a}.shape, dtype=torch.float32).to({a}.dtype)",
            f"{a} * torch.randint(3, {a}.shape)",
            f"{a} * torch.empty({a}.shape, dtype=torch.float32).bernoulli_(0.5)",
            f"{a}[torch.randperm({a}.shape[0])]",
        )
    )
