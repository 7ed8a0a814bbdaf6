"""The options as programs write them, and the fields of the groups that they set.

Names of ONNX Runtime's training API and those of earlier releases are spellings of these; the latter are deprecated.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ort_dynamo.errors import InvalidOptionError, UnknownOptionError
from ort_dynamo.options.plan_grammar import GRAMMAR, is_plan, is_plan_file, read_plan_file
from ort_dynamo.options.spelling import nearest
from ort_dynamo.program.program_warning import warn_program

__all__ = ["DEBUG", "DEPRECATED", "OPTIONS", "POLICIES", "public_name", "read_options"]

Fields = dict[str, Any]
"""Field of a group in groups.py -> its value."""

DEBUG = ("verify", "verify_values", "verify_sessions", "fuse", "contrib_ops", "compare_ranks", "trace_cache")
"""The keys of the option `debug`, which are fields of the same names."""

_CASTS = {
    "strategy": "propagate_cast_ops_strategy",
    "level": "propagate_cast_ops_level",
    "allow": "propagate_cast_ops_allow",
    "layer_norms": "allow_layer_norm_mod_precision",
}

POLICIES: Mapping[str, Fields] = {
    "attention_dropout": {"attn_dropout_recompute": True},
    "gelu": {"gelu_recompute": True},
    "layers": {"transformer_layer_recompute": True},
    "from_inputs": {"recompute_from_inputs": True},
}
"""Name that recompute_plan accepts besides plans -> fields. `layers:4` means the first four layers."""

_LONGEST = 200
"""Maximum number of letters of a text in a message."""

_COUNTED = re.compile(r"layers:([1-9]\d{0,17})")


def _same(name: str) -> Callable[[Any], Fields]:
    return lambda value: {name: value}


def _cast_strategy(value: Any) -> Fields:
    if not isinstance(value, Mapping):
        return {"propagate_cast_ops_strategy": value}
    return {_CASTS[key]: one for key, one in _known("cast_strategy", value, _CASTS).items()}


def _recompute_plan(value: Any) -> Fields:
    """Tell policies from plans, and refuse any other text."""
    if is_plan_file(value):
        value = read_plan_file(value)
    if isinstance(value, str):
        texts: list[Any] = value.split(",")
    elif isinstance(value, (list, tuple)):
        texts = [part for text in value for part in (text.split(",") if isinstance(text, str) else [text])]
    else:
        return {"recompute_plan": value}
    if texts and all(isinstance(text, str) and not text.strip() for text in texts):
        raise InvalidOptionError(name="recompute_plan", value=value, expected="None, or plans as text")
    fields: Fields = {}
    plans: list[Any] = []
    layers: set[str] = set()
    for text in texts:
        name = text.strip() if isinstance(text, str) else ""
        if name in POLICIES:
            fields |= POLICIES[name]
        elif match := _COUNTED.fullmatch(name):
            fields |= {**POLICIES["layers"], "number_recompute_layers": int(match[1])}
        elif name and not is_plan(name):
            near = nearest(name, (*POLICIES, "layers:N"))
            expected = f"{', '.join(map(repr, POLICIES))}, 'layers:N' or a cluster {GRAMMAR}{near}"
            shown = name if len(name) <= _LONGEST else f"{name[:_LONGEST]}…"
            raise InvalidOptionError(name="recompute_plan", value=shown, expected=expected)
        else:
            plans.append(text)
        layers |= {name} if name.startswith("layers") else set()
    if len(layers) > 1:
        raise InvalidOptionError(name="recompute_plan", value=value, expected="layers once, with one number")
    return {**fields, "recompute_plan": plans} if plans or not fields else fields


def _session_options(value: Any) -> Fields:
    if not isinstance(value, Mapping) or "provider_options" not in value:
        return {"session_options": value}
    rest = {name: one for name, one in value.items() if name != "provider_options"}
    return {"provider_options": value["provider_options"], **({"session_options": rest} if rest else {})}


def _cache(value: Any) -> Fields:
    if value is None or isinstance(value, bool):
        return {"disk_cache": value}
    if isinstance(value, (str, os.PathLike)) and os.fspath(value):
        return {"disk_cache": True, "cache_dir": value}
    raise InvalidOptionError(name="cache", value=value, expected="None, True, False or the path of a folder")


def _debug(value: Any) -> Fields:
    return dict(_known("debug", value, DEBUG))


OPTIONS: Mapping[str, Callable[[Any], Fields]] = {
    **{name: _same(name) for name in ("memory_budget", "placement", "fallback")},
    "recompute_plan": _recompute_plan,
    "recompute_casts": _same("recompute_casts"),
    "cast_strategy": _cast_strategy,
    "excess_precision": _same("excess_precision"),
    "backward_sections": _same("backward_sections"),
    "extra_passes": _same("extra_passes"),
    "graph_optimization": _same("graph_optimization"),
    "threads": _same("intra_op_num_threads"),
    "session_options": _session_options,
    "cuda_graphs": _same("cuda_graphs"),
    "save_onnx": _same("save_onnx"),
    "verify": _same("verified_calls"),
    "cache": _cache,
    "debug": _debug,
}
"""Name of an option -> function from a value to the fields that it sets."""

_DEBUG_THEN = ("verify", "verify_values", "verify_sessions", "fuse", "contrib_ops", "compare_ranks", "trace_cache")
"""The keys of the option `debug` that were options once; later ones never were."""

DEPRECATED: Mapping[str, str] = {
    **{name: f'debug={{"{name}": …}}' for name in _DEBUG_THEN},
    **{long: f'cast_strategy={{"{short}": …}}' for short, long in _CASTS.items()},
    "propagate_cast_ops_config": 'cast_strategy={"strategy": …, "level": …, "allow": …}',
    "attn_dropout_recompute": 'recompute_plan="attention_dropout"',
    "gelu_recompute": 'recompute_plan="gelu"',
    "transformer_layer_recompute": 'recompute_plan="layers"',
    "number_recompute_layers": 'recompute_plan="layers:N"',
    "recompute_from_inputs": 'recompute_plan="from_inputs"',
    "intra_op_num_threads": "threads=…",
    "provider_options": 'session_options={"provider_options": …}',
    "disk_cache": "cache=True or cache=False",
    "cache_dir": "cache=FOLDER",
}
"""Deprecated name, which still works -> the option that replaces it."""

_ELSEWHERE = dict.fromkeys(
    ("provider", "providers", "execution_provider", "execution_providers"),
    ": the device of the model's tensors chooses the execution provider, and "
    "session_options={'provider_options': …} has the provider's own options",
)
"""Name that programs know from ONNX Runtime -> the way to the same here, as the end of a message."""

_CONFIG_KEYS = {
    **_CASTS,
    **{name: name for name in _CASTS.values()},
}


def read_options(options: Mapping[str, Any]) -> Fields:
    """Give the fields that options set.

    Raises:
        UnknownOptionError: with the nearest known name.
        InvalidOptionError: two options set one field to different values, or a value has the wrong kind.
    """
    fields: Fields = {}
    for name, value in options.items():
        if name in OPTIONS and not (name in DEPRECATED and isinstance(value, bool)):  # `verify` was a flag
            found = OPTIONS[name](value)
        elif name in DEPRECATED:
            warn_program(f"the ort_train option {name!r} is now {DEPRECATED[name]}", FutureWarning)
            found = cast_config(value) if name == "propagate_cast_ops_config" else {name: value}
        else:
            near = _ELSEWHERE.get(str(name)) or nearest(str(name), OPTIONS)
            raise UnknownOptionError(name=name, nearest=near, known=", ".join(OPTIONS))
        for field, one in found.items():
            if field in fields and fields[field] != one:
                expected = f"{fields[field]!r}, as another option has it, or to be given once"
                raise InvalidOptionError(name=public_name(field), value=one, expected=expected)
            fields[field] = one
    return fields


def cast_config(value: Any) -> Fields:
    """Give the fields of ORTModule's `propagate_cast_ops_config`, whose keys may be short or long."""
    return {_CONFIG_KEYS[key]: one for key, one in _known("propagate_cast_ops_config", value, _CONFIG_KEYS).items()}


def public_name(field: str) -> str:
    """Give the option that sets a field, as a program writes it."""
    return _PUBLIC.get(field, field)


_PUBLIC = {
    **{name: f"debug[{name!r}]" for name in DEBUG},
    **{long: f"cast_strategy[{short!r}]" for short, long in _CASTS.items()},
    "number_recompute_layers": "recompute_plan",
    "intra_op_num_threads": "threads",
    "verified_calls": "verify",
    "provider_options": "session_options['provider_options']",
    "disk_cache": "cache",
    "cache_dir": "cache",
}


def _known(option: str, value: Any, keys: Iterable[str]) -> Mapping[str, Any]:
    """Check that a value is a dict of known keys."""
    if not isinstance(value, Mapping):
        raise InvalidOptionError(name=option, value=value, expected="a dict")
    for key in value:
        if key not in keys:
            name = f"{option}.{key}"
            raise UnknownOptionError(name=name, nearest=nearest(str(key), keys), known=", ".join(keys))
    return value
