"""ONNX's names as keys of a state dict: torch has modules along the dots, and takes not every name."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import Tensor, nn

__all__ = ["Holder", "place_of", "state_keys", "tensor_of"]


class Holder(nn.Module):
    """A module that only holds parameters, buffers and modules, under the names that the model gives them."""

    def forward(self) -> None:
        """Refuse: there is nothing to compute."""
        raise NotImplementedError("a part of an OnnxModule cannot be called: its nodes belong to no module")


_TAKEN = frozenset(dir(nn.Module())) | {"training"}


def state_keys(names: Iterable[str], taken: Collection[str]) -> dict[str, str]:
    """Return the key of each name: the name itself, if its parts are valid attributes of modules.

    A name is not valid if a part is empty or an attribute of nn.Module ("forward"), or if another name extends it after
    a dot. Then dots become underscores, and underscores are appended until the key is unique.

    Args:
        names: the names, without duplicates.
        taken: further names of the outermost module.
    """
    every = list(names)
    parents = {".".join(parts[:end]) for parts in (name.split(".") for name in every) for end in range(1, len(parts))}
    own = {name for name in every if name not in parents and _fits(name, taken)}
    used = own | {".".join(key.split(".")[:end]) for key in own for end in range(1, key.count(".") + 1)}
    keys = {}
    for name in every:
        key = name
        if name not in own:
            key = name.replace(".", "_") or "_"
            while key in used or not _fits(key, taken):
                key += "_"
            used.add(key)
        keys[name] = key
    return keys


def _fits(name: str, taken: Collection[str]) -> bool:
    parts = name.split(".")
    return all(parts) and parts[0] not in taken and not any(part in _TAKEN for part in parts)


def place_of(module: nn.Module, key: str) -> tuple[nn.Module, str]:
    """Return the module that holds a key, created if missing, and the name in it."""
    *path, leaf = key.split(".")
    for part in path:
        child = module._modules.get(part)
        if child is None:
            child = Holder()
            module.add_module(part, child)
        module = child
    return module, leaf


def tensor_of(module: nn.Module, key: str) -> Tensor:
    """Return the parameter or buffer of a key."""
    holder, leaf = place_of(module, key)
    return getattr(holder, leaf)
