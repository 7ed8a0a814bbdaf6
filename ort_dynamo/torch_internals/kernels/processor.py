"""The vector instructions of this machine's processor, by torch."""

from __future__ import annotations

import platform

import torch

__all__ = ["instruction_set"]


def instruction_set() -> str:
    """Return the architecture and its extensions, as text that is equal on machines that have the same ones.

    torch 2.13 lists them; before, it gives those that its own kernels use, which the environment may narrow.
    """
    listed = getattr(torch.cpu, "get_capabilities", None)
    if listed is None:
        return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    extensions = sorted(name for name, is_there in listed().items() if is_there is True)
    return f"{platform.machine()} {' '.join(extensions)}"
