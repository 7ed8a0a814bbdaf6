"""Make of Dynamo's messages one readable line each: the reason, and the setting that changes it."""

from __future__ import annotations

import re

from ort_dynamo.torch_internals.tracing.frames import Frame

__all__ = ["in_a_line", "is_recurrent", "limit_reason", "mismatch", "rule"]

_SETTING = "torch._dynamo.config."
_RECURRENT = "RNN, GRU, or LSTM"
_CONTEXT = re.compile(r"Developer debug context: (.*)")
_LAYER = re.compile(r"(LSTM|GRU|RNN)\(")
_LOGGED = re.compile(r"method: <\w+ (\S+) \(\w+\)>\.(\w+)")
_IGNORED = re.compile(r"torch\._dynamo\.config\.ignore_\w+")
_RAISED = "backend="
_HARMLESS = "ends the graph: results stay the same, and Python runs between two graphs"


def in_a_line(text: str) -> str:
    """Return the reason in Dynamo's message, and its fix.

    Messages for Dynamo's developers are replaced by a line of ours. Of others, the result is the first line, the line
    of the explanation, and a setting if a hint has one.
    """
    if is_recurrent(text):
        found = _LAYER.match(_context(text))
        layers = f"nn.{found[1]}" if found else "nn.LSTM, nn.GRU and nn.RNN"
        return f"torch.compile leaves {layers} in eager mode. Set torch._dynamo.config.allow_rnn = True to compile it"
    if text.startswith("Unknown fail_and_restart_analysis"):
        return f"a call whose reason torch does not record {_HARMLESS}"
    if text.startswith("logging.Logger method"):
        return _logger(text)
    if text.startswith("Failed to trace builtin operator") and _context(text).startswith("builtin print "):
        moved = "torch._dynamo.config.reorderable_logging_functions.add(print) prints after the graph"
        return f"a call of print {_HARMLESS}. {moved}"
    return _general(text)


def is_recurrent(text: str) -> bool:
    """Check whether Dynamo's message is about an LSTM, a GRU or an RNN."""
    return _RECURRENT in text


def _logger(text: str) -> str:
    found, setting = _LOGGED.match(_context(text)), _IGNORED.search(text)
    call = f"a call of a logger ({found[1]}.{found[2]})" if found else "a call of a logger"
    method = f"logging.Logger.{found[2]}" if found else "the method"
    return f"{call} {_HARMLESS}" + (f". {setting[0]}.add({method}) leaves it out" if setting else "")


def _context(text: str) -> str:
    found = _CONTEXT.search(text)
    return found[1] if found else ""


def _general(text: str) -> str:
    title, _, rest = text.strip().partition("\n")
    if title.startswith(_RAISED):
        return " ".join([title, *rest.splitlines()[:1]]).rstrip(":")
    lines = rest.splitlines()
    said = [title, *(line.partition("Explanation:")[2] for line in lines if "Explanation:" in line)]
    settings = [line.partition("Hint:")[2].strip() for line in lines if _SETTING in line.partition("Hint:")[2]]
    found = ": ".join(part.strip().rstrip(":") for part in said[:2])
    return f"{found.removesuffix('.')}. {settings[0]}" if settings else found


def limit_reason(frame: Frame) -> str:
    """Return the recompile limit that a function reached, and the fix."""
    setting, number = f"{_SETTING}{frame.limit}", re.search(r"currently set to (\d+)", frame.failure or "")
    shared = "; torch counts all modules of torch.nn that are compiled directly as one function"
    last = mismatch(frame.recompiled or "")
    return (
        f"{setting}{f' ({number[1]})' if number else ''} is reached, so calls that fit no graph compiled before run in "
        f"eager. Set it higher, or call torch.compiler.reset() before you compile another model"
        f"{shared if frame.is_wrapper else ''}{f'; last mismatch: {last}' if last else ''}"
    )


def mismatch(recompiled: str) -> str:
    """Return the guard that did not hold, without torch's name of the attempt."""
    return re.sub(r"^\d+/\d+(_\d+)?: ", "", recompiled.strip().partition("\n")[0])


def rule(reason: str) -> str:
    """Return why Dynamo skips the forward of a module compiled in place, and the fix."""
    if "MOD_SKIPLIST" in reason:
        reason = "before torch 2.15, Dynamo skips the forward of torch's own modules after module.compile()"
    return f"{reason}; torch.compile(module) compiles it"
