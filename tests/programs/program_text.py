"""A module program as a value, and its text, which a failing seed prints and which runs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

__all__ = ["BACKWARDS", "LOSSES", "PREAMBLE", "Input", "Line", "Program", "least_precise"]

_VALUE = re.compile(r"\b[vx]\d+\b")
_PART = re.compile(r"\bself\.(p\d+)\b")

PREAMBLE = """\
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

def tied(layer, other):
    layer.weight = other.weight
    return layer

"""

LOSSES = {
    "weighted": "(t * torch.linspace(-1, 1, t.numel(), dtype=t.dtype).view(t.shape)).sum()",
    "sum": "t.sum()",  # its gradient is an expanded scalar
    "cosine": "t.cos().sum()",
    "transposed": "(t.mT * torch.linspace(0, 1, t.numel(), dtype=t.dtype).view(t.mT.shape)).sum() if t.dim() > 1"
    " else t.sum()",
}
"""Name -> the term of a result `t` in the loss."""

BACKWARDS = {
    "once": "total.backward()",
    "retained": "total.backward(retain_graph=True); total.backward()",
    "refused": "total.backward(); total.backward()",  # if the first has freed a saved tensor
}
"""Name -> text."""

_LAYOUTS = {
    "contiguous": "torch.randn([{sizes}])",
    "channels_last": "torch.randn([{sizes}]).to(memory_format=torch.channels_last)",
    "transposed": "torch.randn([{reversed}]).permute([{order}])",
    "sliced": "torch.randn([{sizes}, 3])[..., 1]",
    "expanded": "torch.randn([{sizes}])[:1].expand([{sizes}])",
    "integers": "torch.randint(5, [{sizes}])",
    "mask": "torch.rand([{sizes}]) > 0.3",
}
"""Name -> text of a tensor."""


@dataclass(frozen=True)
class Input:
    """An argument of the program.

    Attributes:
        shape: its sizes; None stands for the batch.
        layout: a key of `_LAYOUTS`.
        differentiable: whether its gradient is compared.
        copied: whether the program gets a copy of it, which it may write to although the leaf needs a gradient.
    """

    name: str
    shape: tuple[int | None, ...]
    layout: str = "contiguous"
    differentiable: bool = True
    copied: bool = False

    @property
    def is_floating_point(self) -> bool:
        return self.layout not in ("integers", "mask")

    def text(self, dtype: str) -> str:
        sizes = ["batch" if size is None else str(size) for size in self.shape]
        order = ", ".join(str(dim) for dim in reversed(range(len(sizes))))
        made = _LAYOUTS[self.layout].format(sizes=", ".join(sizes), reversed=", ".join(reversed(sizes)), order=order)
        if self.is_floating_point and dtype != "float32":
            made += f".to(torch.{dtype})"
        return made + (".requires_grad_()" if self.differentiable else "")


@dataclass(frozen=True)
class Line:
    """A statement.

    Attributes:
        made: the names it assigns.
        region: "" or a kind ("no_grad", "autocast", "checkpoint") and a number; neighbours of one region share a block.
    """

    text: str
    made: tuple[str, ...] = ()
    region: str = ""

    def reads(self) -> frozenset[str]:
        return frozenset(_VALUE.findall(self.text)) - set(self.made)


@dataclass(frozen=True)
class Program:
    """A module, its arguments, and the use of its results.

    Attributes:
        parts: attribute of the module -> text that makes it.
        results: names of values; a name may occur twice.
        training: the module's mode.
        channels_last: whether the module's weights are.
        after: a statement on `results` between forward and backward, or "".
        loss: a key of `LOSSES`.
        backward: a key of `BACKWARDS`.
        dtype: of parameters and inputs.
    """

    inputs: tuple[Input, ...]
    parts: Mapping[str, str] = field(default_factory=dict)
    body: tuple[Line, ...] = ()
    results: tuple[str, ...] = ()
    training: bool = False
    channels_last: bool = False
    after: str = ""
    loss: str = "weighted"
    backward: str = "once"
    dtype: str = "float32"

    def with_line(self, line: Line, parts: Mapping[str, str]) -> Program:
        return replace(self, body=(*self.body, line), parts={**self.parts, **parts})

    @property
    def precision(self) -> str:
        """The least precise dtype that a line computes in: its name."""
        return least_precise(self.source(), self.dtype)

    @property
    def draws(self) -> bool:
        """Check whether a line may draw random numbers."""
        texts = [line.text for line in self.body] + [text for text in self.parts.values() if "Parameter" not in text]
        return any(word in text for text in texts for word in ("rand", "dropout", "bernoulli", "Transformer"))

    def without_unread(self) -> Program:
        """Return the program without the lines that make values which nothing reads; a write reads."""
        body = list(self.body)
        for line in reversed(self.body):
            later = {name for other in body if other is not line for name in other.reads()} | set(self.results)
            if line.made and not later & set(line.made):
                body.remove(line)
        return replace(self, body=tuple(body))

    def pruned(self) -> Program:
        """Return the program without the parts and arguments that nothing names."""
        lines = [line.text for line in self.body]
        parts = {name for line in lines for name in _PART.findall(line)}
        for name, text in reversed(self.parts.items()):
            parts |= {*_PART.findall(text)} if name in parts else set()
        read = {name for line in lines for name in _VALUE.findall(line)} | set(self.results)
        return replace(
            self,
            parts={name: text for name, text in self.parts.items() if name in parts},
            inputs=tuple(given for given in self.inputs if given.name in read) or self.inputs[:1],
        )

    def source(self, everything: bool = False) -> str:
        """Write the functions of a program.

        They are `make()`, `inputs(batch)`, `arguments(*inputs)`, `loss(results)`, `after(results)`, `backward(total)`.

        Args:
            everything: `forward` returns all values by their names, instead of its results.
        """
        names = ", ".join(given.name for given in self.inputs)
        given = ", ".join(f"{one.name}.clone()" if one.copied else one.name for one in self.inputs)
        layout = ".to(memory_format=torch.channels_last)" if self.channels_last else ""
        layout += f".to(torch.{self.dtype})" if self.dtype != "float32" else ""
        texts = [
            "class Program(nn.Module):",
            "    def __init__(self):",
            "        super().__init__()",
            *(f"        self.{name} = {text}" for name, text in self.parts.items()),
            "",
            f"    def forward(self, {names}):",
            *(f"        {text}" for text in self._statements(everything)),
            f"        return {'locals(),' if everything else _tuple(self.results)}",
            "",
            "def make():",
            f"    return Program().{'train' if self.training else 'eval'}(){layout}",
            "",
            "def inputs(batch):",
            f"    return {_tuple([one.text(self.dtype) for one in self.inputs])}",
            "",
            f"def arguments({names}):",
            f"    return {given},",
            "",
            "def loss(results):",
            f"    return sum({LOSSES[self.loss]} for t in results if t.requires_grad)",
            "",
            "def after(results):",
            f"    {self.after or 'pass'}",
            "",
            "def backward(total):",
            f"    {BACKWARDS[self.backward]}",
        ]
        return "\n".join(texts) + "\n"

    def _statements(self, everything: bool) -> Iterator[str]:
        done = 0
        for region, group in groupby(self.body, lambda line: line.region):
            lines = [*group]
            done += len(lines)
            kind = region.split(" ")[0]
            if kind == "checkpoint":
                later = {name for line in self.body[done:] for name in line.reads()} | set(self.results)
                made = [name for line in lines for name in line.made]
                kept = [name for name in made if everything or name in later] or made[-1:]
                yield f"def {region.replace(' ', '_')}():"
                yield from (f"    {line.text}" for line in lines)
                yield f"    return {_tuple(kept)}"
                yield f"{_tuple(kept)} = checkpoint({region.replace(' ', '_')}, use_reentrant=False)"
            elif kind:
                yield "with torch.no_grad():" if kind == "no_grad" else 'with torch.autocast("cpu", torch.bfloat16):'
                yield from (f"    {line.text}" for line in lines)
            else:
                yield from (line.text for line in lines)


def least_precise(source: str, dtype: str) -> str:
    """Return the least precise of a program's own dtype and those that its lines name."""
    lines = source.replace(".float()", ".to(torch.float32)")
    named = [dtype, *re.findall(r"torch\.(bfloat16|float16|float32)\b", lines)]
    return next(one for one in ("bfloat16", "float16", "float32", "float64") if one in named)


def _tuple(texts: Sequence[str]) -> str:
    return ", ".join(texts) + ("," if len(texts) == 1 else "")
