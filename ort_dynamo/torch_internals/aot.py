"""AOTAutograd: its configuration, its metadata on the graph that it makes, and how it cuts it."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from ort_dynamo.torch_internals.lookup import private

if TYPE_CHECKING:
    from torch._functorch._aot_autograd.schemas import ViewAndMutationMeta
    from torch._functorch.partitioners import default_partition
else:
    default_partition = private("torch._functorch.partitioners:default_partition")
    if default_partition is None:  # all tested versions have it there, and in functorch's public module
        from functorch.compile import default_partition

__all__ = ["backward_at_once", "default_partition", "metadata", "views_begin_at_the_input"]

_config = private("torch._functorch.config")
_tracing_context = private("torch._guards:TracingContext")


def backward_at_once() -> AbstractContextManager[Any]:
    """Make AOTAutograd compile the backward together with the forward while this is open.

    Where torch lacks the switch (all tested versions have it), AOTAutograd decides by itself, and a backward that
    fails to compile, or that `fallback="error"` refuses, does so at the first `.backward()`.
    """
    if not hasattr(_config, "force_non_lazy_backward_lowering"):
        return nullcontext()
    switched: AbstractContextManager[Any] = _config.patch(force_non_lazy_backward_lowering=True)
    return switched


def metadata() -> ViewAndMutationMeta | None:
    """Give AOTAutograd's metadata of the graph that is being compiled; None if there is none."""
    context = None if _tracing_context is None else _tracing_context.try_get()
    return None if context is None else context.fw_metadata


@functools.cache
def views_begin_at_the_input() -> bool:
    """Check whether AOTAutograd adds the offsets of input and result when it turns a result into a view of that input.

    It makes such a view for a result that says that it lies in other memory. torch 2.15 adds the offsets; 2.13 and
    earlier take the result's offset for one from the start of the input's memory. The check makes one such view. Where
    torch lacks the function, which all tested versions have, the answer is no.
    """
    make_view = private("torch._functorch._aot_autograd.functional_utils:gen_alias_from_base")
    if make_view is None:
        return False
    given = torch.empty(4)[1:]
    result = torch.empty(4)
    result.set_(torch.empty(4).untyped_storage(), 1, (2,), (1,))  # no view of a tensor
    return bool(make_view(given, result, False, None, replay_views=False).storage_offset() == 2)
