"""Writes docs/reference/api.md, the reference of the public names, from their docstrings: `python .ci/api_page.py`."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from inspect import ismodule
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parent.parent / "docs/reference/api.md"

OPENING = """\
# API

These are the public names. They keep their meaning from release to release, or the changelog names the replacement. All
other names may change at any time.

The backend itself has no name to import: torch finds it as `backend="ort_train"` and as `backend="onnxrt"`. See also
its [options](options.md) and [errors](errors.md).

This page is written from the docstrings, by `python .ci/api_page.py`.

"""

COUNTERS = """\
## Counters

`torch._dynamo.utils.counters` counts what was compiled since the counters were last cleared, under either name of the
backend. `ort_dynamo.summary()` has the same as data.

| topic | key | counts |
|---|---|---|
| `"ort_train"` | `graphs`, `islands`, `native_nodes`, `chosen_nodes`, `eager_nodes` | graphs, islands, nodes by place |
| `"ort_train_native"` | an overload | its nodes in ONNX Runtime |
| `"ort_train_by_design"` | an overload | its nodes in torch by design: random ops, collectives |
| `"ort_train_chosen"` | an overload and a reason | its nodes in torch by choice (placement), for that reason |
| `"ort_train_eager"` | an overload and a reason | its nodes in eager (fallback), for that reason |
"""

TRAINING = {
    "ortmodule": "Also has ORTModule, DebugOptions and LogLevel ([migrating](../how_to/migrating_from_ortmodule.md)).",
    "ortmodule.experimental.json_config": "Configuration by a file.",
    "experimental": "The export of gradients.",
    "optim": "Optimizers, and what an ORTTrainer has in their place; `ort_dynamo.optim` is the same.",
    "amp": "Loss scalers; `ort_dynamo.amp` is the same.",
    "ort_trainer": "The first ORTTrainer, that of onnxruntime.capi.ort_trainer; its descriptions are above.",
    "utils.hooks": "Hooks that look at activations.",
    "utils.data": "Samplers.",
}
"""Module below ort_dynamo.training -> its description."""

OTHERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "passes.onnx": ("Passes on ONNX models.", ()),
    "onnx_module": ("ONNX models as torch modules.", ()),
    "embedding": ("For front ends ([build a front end](../internals/embedding.md)).", ("join_models",)),
    "testing": ("For tests of lowerings, passes and models.", ()),
    "fx_testing": ("For tests of passes on FX graphs.", ()),
}
"""Module below ort_dynamo -> its description, and the names to list; none stands for all."""

_TABLES = ("TOLERANCES", "EXACT")
"""Public values that have no docstring of their own."""

_SECTIONS = ("Args", "Attributes", "Returns", "Raises", "Yields")
_LISTS = ("Args", "Attributes", "Raises")
"""Sections of names with descriptions; the others are prose."""


def main() -> None:
    """Write the page."""
    PAGE.write_text(make_page())


def make_page() -> str:
    """Make the page's text."""
    package = importlib.import_module("ort_dynamo")
    names = [name for name in package.__all__ if not name.startswith("_") and not ismodule(getattr(package, name))]
    parts = [OPENING, "## ort_dynamo\n\n`ort_dynamo.__version__` is the version, as text.\n\n"]
    parts += [entry(f"ort_dynamo.{name}", getattr(package, name)) for name in names]
    for path, opening in TRAINING.items():
        module = importlib.import_module(f"ort_dynamo.training.{path}")
        told = [getattr(package, name) for name in names]
        public = [n for n in module.__all__ if callable(getattr(module, n)) and getattr(module, n) not in told]
        parts.append(f"## ort_dynamo.training.{path}\n\n{opening}\n\n")
        parts += [entry(f"ort_dynamo.training.{path}.{name}", getattr(module, name)) for name in public]
    parts.append("## ort_dynamo.passes.fx\n\nPasses on FX graphs are internals. `register_pass` adds your own.\n\n")
    for path, (opening, names) in OTHERS.items():
        module = importlib.import_module(f"ort_dynamo.{path}")
        parts.append(f"## ort_dynamo.{path}\n\n{opening}\n\n")
        shown = names or [name for name in module.__all__ if name not in _TABLES]
        parts += [entry(f"ort_dynamo.{path}.{name}", getattr(module, name)) for name in shown]
    return "".join([*parts, COUNTERS])


def entry(path: str, value: Any) -> str:
    """Make the entry of a function or class: its signature, its docstring, and a class's methods."""
    text = f"### `{path}{signature(value)}`\n\n{described(value)}\n\n"
    as_in_torch = []
    for name, method in sorted(vars(value).items()) if inspect.isclass(value) else ():
        inner = method.fget if isinstance(method, property) else getattr(method, "__func__", method)
        if name.startswith("_") or not inspect.isfunction(inner) or name == "call":
            continue
        if has_torchs_docstring(value, name):
            as_in_torch.append(f"`{name}`")
            continue
        shown = "" if isinstance(method, property) else signature(inner)
        text += f"#### `{value.__name__}.{name}{shown}`\n\n{described(inner)}\n\n"
    if as_in_torch:
        text += f"These methods do the same as torch's: {', '.join(as_in_torch)}.\n\n"
    return text


def has_torchs_docstring(kind: type, name: str) -> bool:
    """Check whether a class of torch describes a method, and the given one, which replaces it, does the same."""
    text = inspect.getdoc(getattr(kind, name))
    bases = (base for base in kind.__mro__ if base.__module__.startswith("torch."))
    return any(text == inspect.getdoc(vars(base)[name]) for base in bases if name in vars(base))


def signature(value: Any) -> str:
    """Give a signature as text; a pass's and a dataclass's is that of its parameters."""
    if inspect.isclass(value) and not dataclasses.is_dataclass(value):
        return ""
    given = inspect.signature(value)
    kept = [p.replace(annotation=_Type(p.annotation)) for name, p in given.parameters.items() if name != "self"]
    returns = inspect.Signature.empty if inspect.isclass(value) else _Type(given.return_annotation)
    text = str(given.replace(parameters=kept, return_annotation=returns))
    text = text.replace(" = <factory>", " = ...")
    return re.sub(r"<[^<>]*(<[^<>]*>)?[^<>]* at 0x[0-9a-f]+>", "...", text)  # a function as a default


class _Type:
    """An annotation as it stands in the sources, without quotes around it."""

    def __new__(cls, annotation: Any) -> Any:
        """Return an annotation that is no text, or none, as it is."""
        return super().__new__(cls) if isinstance(annotation, str) else annotation

    def __init__(self, annotation: str) -> None:
        self._text = annotation.strip("'\"") if "[" not in annotation else annotation

    def __repr__(self) -> str:
        return self._text


def described(value: Any) -> str:
    """Give a docstring as Markdown."""
    lines: list[str] = []
    in_section = in_list = False
    for line in (inspect.getdoc(value) or "").splitlines():
        section = line.strip().removesuffix(":")
        if line == f"{section}:" and section in _SECTIONS:
            in_section, in_list = True, section in _LISTS
            lines += [f"**{section}**", ""]
        elif in_list and (found := re.match(r"^    (\*{0,2}\w[\w., ]*?): (.*)$", line)):
            lines.append(f"- `{found[1]}`: {found[2]}")
        elif in_section and line.startswith("    "):
            text = line.strip()
            lines.append(f"  {text}" if lines and lines[-1].startswith(("- ", "  ")) else text)
        else:
            in_section &= not line
            in_list &= in_section
            lines.append(line)
    return "\n".join(lines).strip()


if __name__ == "__main__":
    main()
