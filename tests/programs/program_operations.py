"""Ingredients without weights: activations, arithmetic, reductions, views; and writes."""

from __future__ import annotations

from program_draft import Draft, call, ingredient
from torch import Tensor

ACTIVATIONS = (
    *("relu", "relu", "relu", "relu6", "hardtanh", "hardswish", "hardsigmoid", "elu", "celu", "selu", "gelu", "silu"),
    *("mish", "sigmoid", "tanh", "softplus", "leaky_relu", "logsigmoid", "softshrink", "hardshrink", "softsign"),
)


@ingredient(12)
def activation(draft: Draft, a: str, value: Tensor) -> str:
    return f"F.{draft.pick(ACTIVATIONS)}({a})"


@ingredient(4)
def activation_with_arguments(draft: Draft, a: str, value: Tensor) -> str:
    forms = [
        f"F.gelu({a}, approximate='tanh')",
        f"F.elu({a}, alpha=0.5)",
        f"F.celu({a}, alpha=2.0)",
        f"F.leaky_relu({a}, 0.2)",
        f"F.softplus({a}, beta=2)",
        f"F.threshold({a}, 0.1, -0.5)",
        f"F.hardtanh({a}, -0.5, 0.7)",
        f"2 ** {a}.clamp(-3, 3)",
        f"{a} ** 2",
        f"{a}.abs().sqrt() + {a}" if bool((value.abs() > 1e-2).all()) else f"{a}.square()",
        f"{a}.clamp(min=-0.5)",
        f"torch.xlogy({a}, {a}.abs() + 0.5)",
        f"F.logsigmoid(-{a})",
        f"{a}.exp() / 8",
        f"torch.where({a} > 0.2, {a}, 0.1)",
        f"1 - {a}",
        f"{a} / 2",
        f"-{a}",
    ]
    if value.dim() == 4 and value.shape[1] > 1:
        forms += [f"{draft.part(call('nn.PReLU', value.shape[1]))}({a})"] * 2
    return draft.pick(forms)


@ingredient(9)
def arithmetic(draft: Draft, a: str, value: Tensor) -> str | None:
    b = draft.alike(a, value.shape)
    if b is None:
        return None
    forms = [f"{a} + {b}"] * 4 + [f"{a} - {b}", f"{a} * {b}", f"torch.maximum({a}, {b})", f"torch.lerp({a}, {b}, 0.3)"]
    forms += [f"torch.xlogy({a}, {b}.abs() + 0.5)", f"torch.addcmul({a}, {a}, {b}, value=0.5)"]
    forms += [f"torch.hypot({a}, {b} + 8)", f"{a} / ({b}.abs() + 1)", f"torch.where({a} > {b}, {a}, {b} * 0.5)"]
    if bool((draft.values[b].abs() > 1e-4).all()):  # no zero, which has a sign
        forms += [f"torch.copysign({a}, {b})"] * 2
    return draft.pick(forms)


@ingredient(5)
def broadcast(draft: Draft, a: str, value: Tensor) -> str | None:
    """Join a value with a smaller one that broadcasts to its shape."""

    def fits(other: Tensor) -> bool:
        sizes = tuple(other.shape)
        padded = (1,) * (value.dim() - len(sizes)) + sizes
        smaller = len(sizes) <= value.dim() and sizes != tuple(value.shape)
        return smaller and all(x in (1, y) for x, y in zip(padded, value.shape, strict=True))

    b = draft.other(a, fits)
    if b is None:
        return None
    sign = draft.pick("+-*")
    return draft.pick((f"{a} {sign} {b}", f"{b} {sign} {a}", f"{b}.expand_as({a}) {sign} {a}"))


@ingredient(3, 2, 3, 4, 5)
def concatenation(draft: Draft, a: str, value: Tensor) -> str:
    b = draft.other(
        a, lambda o: o.dim() == value.dim() and o.shape[:1] + o.shape[2:] == value.shape[:1] + value.shape[2:]
    )
    return draft.pick((f"torch.cat([{a}, {b or a}], 1)", f"torch.cat([{b or a}, {a}], 1)"))


@ingredient(2, 2, 3, 4, 5)
def several(draft: Draft, a: str, value: Tensor) -> tuple[str, int] | None:
    channels = value.shape[1]
    if channels < 2:
        return None
    forms = [f"{a}.split([1, {channels - 1}], 1)"]
    forms += [f"{a}.chunk(2, 1)"] * 3 if channels % 2 == 0 else []
    return draft.pick(forms), 2


@ingredient(4)
def reduction(draft: Draft, a: str, value: Tensor) -> str | None:
    dims = [*range(1, value.dim())]
    if not dims:
        return None
    over = draft.pick(dims)
    kept = draft.pick((", keepdim=True", ""))
    every = draft.pick((f"({', '.join(str(dim) for dim in dims)},)", f"({dims[-1]},)", str(over)))
    return draft.pick(
        (
            f"{a}.mean({every}{kept})",
            f"{a}.mean({every}{kept})",
            f"{a}.sum({every}{kept})",
            f"{a}.amax({every}{kept})",
            f"{a}.var({every}{kept}, correction=0)",
            f"{a}.logsumexp({every}{kept})",
            f"{a}.softmax({over})",
            f"{a}.log_softmax({over})",
            f"{a}.cumsum({over})",
            f"F.normalize({a}, dim={over})",
            f"{a}.max({over}{kept})[0]",
        )
    )


@ingredient(7)
def view(draft: Draft, a: str, value: Tensor) -> str | None:
    if value.dim() < 2:
        return None
    x, y = draft.choose.sample(range(1, value.dim()), 2) if value.dim() > 2 else (0, 1)
    size = value.shape[x]
    forms = [
        f"{a}.view({a}.shape[0], -1)",
        f"{a}.flatten(1)",
        f"{a}.reshape({a}.shape[0], -1)",
        f"{a}[:, 1:]",
        f"{a}[..., :-1]",
        f"{a}[..., ::2]",
        f"{a}.narrow({x}, 0, {max(1, size // 2)})",
        f"{a}.select({x}, {size - 1})",
        f"{a}.unsqueeze(1)",
        f"{a}[:, :1].expand(-1, 3, {', '.join(['-1'] * (value.dim() - 2))})" if value.dim() > 2 else f"{a}[:, :1]",
        f"{a}.detach()",
        f"{a}.squeeze()",
        f"{a}[:1]",
    ]
    forms += [f"{a}.transpose({x}, {y})"] * 2 if x else []
    forms += [f"{a}.flatten(2)"] * 3 if value.dim() > 3 else []
    forms += [f"{a}.permute(0, 2, 3, 1)"] * 3 if value.dim() == 4 else []
    return draft.pick(forms)


@ingredient(5)
def copy(draft: Draft, a: str, value: Tensor) -> str:
    forms = [f"{a}.contiguous()", f"{a}.clone()", f"{a}.flip(-1)", f"{a}.flip(0)", f"{a}.roll(1, -1)"]
    if value.dim() == 4:
        forms += [f"{a}.permute(0, 2, 3, 1).contiguous()"] * 2
        forms += [f"{a}.permute(0, 2, 3, 1).contiguous().view({a}.shape[0], -1, {value.shape[1]})"] * 2
        forms += [f"{a}.permute(0, 3, 1, 2).contiguous()", f"{a}.contiguous(memory_format=torch.channels_last)"]
        forms += [f"{a}.to(memory_format=torch.channels_last)", f"{a}.repeat(1, 2, 1, 1)"]
    return draft.pick(forms)


@ingredient(3, 4)
def tokens(draft: Draft, a: str, value: Tensor) -> str:
    return draft.pick((f"{a}.flatten(2).transpose(1, 2)", f"{a}.flatten(2).mT.contiguous()"))


@ingredient(4, 3)
def image_of_tokens(draft: Draft, a: str, value: Tensor) -> str | None:
    length = value.shape[1]
    heights = [height for height in range(2, 9) if length % height == 0]
    if not heights:
        return None
    height = draft.pick(heights)
    return draft.pick(
        (
            f"{a}.transpose(1, 2).reshape({a}.shape[0], -1, {height}, {length // height})",
            f"{a}.unflatten(1, ({height}, -1)).permute(0, 3, 1, 2)",
        )
    )


def write(draft: Draft, a: str, value: Tensor) -> str:
    """Return a statement that writes to a value, or to a part of it."""
    b = draft.alike(a, value.shape)
    target = a
    if value.dim() > 1 and draft.chance(0.35):
        target = draft.pick((f"{a}[:, 1:]", f"{a}[..., 0]", f"{a}.transpose(0, 1)", f"{a}.detach()", f"{a}[:1]"))
        b = None
    forms = ["relu_()", "add_(0.5)", "mul_(0.7)", "clamp_(-0.5, 0.9)", "sigmoid_()", "zero_()", "neg_()", "fill_(0.3)"]
    statements = [f"{target}.{form}" for form in forms]
    statements += [f"F.{name}({target}, inplace=True)" for name in ("relu", "leaky_relu", "elu", "silu", "hardtanh")]
    statements += [f"{target}.{name}({b})" for name in ("add_", "mul_", "copy_")] * 2 if b else []
    return draft.pick(statements)


def write_to_buffer(draft: Draft, a: str, value: Tensor) -> str:
    if value.dim() < 2:
        return f"{draft.part('nn.Buffer(torch.zeros(()))')}.add_({a}.detach().mean())"
    buffer = draft.part(f"nn.Buffer(torch.zeros({value.shape[1]}))")
    mean = f"{a}.detach().transpose(0, 1).flatten(1).mean(1)"
    return draft.pick((f"{buffer}.mul_(0.9).add_({mean})", f"{buffer}.copy_({mean})", f"{buffer}.lerp_({mean}, 0.2)"))
