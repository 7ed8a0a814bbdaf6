"""Which execution provider serves which torch device, and with which options."""

from __future__ import annotations

from functools import lru_cache

import torch

from ort_dynamo.errors import InvalidOptionError, ProviderNotAvailableError
from ort_dynamo.runtime.capabilities import (
    TESTED_RUNTIMES,
    InstalledRuntime,
    installed_runtime,
    kernel_table,
    recorded_kernel_table,
    say_if_untested,
)
from ort_dynamo.runtime.defects import defects_of
from ort_dynamo.runtime.importing import onnxruntime
from ort_dynamo.target import Target

__all__ = ["find_target", "provider_options", "recorded_cpu_targets", "recorded_cuda_targets"]

_PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}

_ADVICE = {
    "CUDAExecutionProvider": "Install 'ort-dynamo[cuda]' in place of the present runtime, or use the CPU.",
}


@lru_cache(maxsize=8)
def find_target(device_type: str) -> Target:
    """The target for tensors on a device type.

    Raises:
        ProviderNotAvailableError: no provider serves the device, or the installed runtime lacks it.
    """
    runtime = installed_runtime()
    say_if_untested()
    available = onnxruntime().get_available_providers()
    provider = _PROVIDERS.get(device_type)
    if provider is None or provider not in available:
        raise ProviderNotAvailableError(
            provider=provider or "an execution provider",
            device=device_type,
            reason="the installed ONNX Runtime has none" if provider else "no provider serves this device",
            package=runtime.package,
            version=runtime.version,
            available=", ".join(available),
            advice=_ADVICE.get(provider or "", ""),
        )
    return Target(
        package=runtime.package,
        version=runtime.version,
        provider=provider,
        device_type=device_type,
        gradient_kernels=runtime.has_gradient_kernels,
        kernels=kernel_table(runtime, provider),
        defects=defects_of(runtime.package, runtime.version, provider),
    )


def recorded_cpu_targets() -> tuple[Target, ...]:
    """The CPU targets of the tested runtimes, whatever is installed: for documentation."""
    return tuple(_recorded_target(runtime, "cpu") for runtime in TESTED_RUNTIMES)


def recorded_cuda_targets() -> tuple[Target, ...]:
    """The same of CUDA, to say without a GPU what would run there."""
    return tuple(_recorded_target(runtime, "cuda") for runtime in TESTED_RUNTIMES)


def _recorded_target(runtime: InstalledRuntime, device_type: str) -> Target:
    provider = _PROVIDERS[device_type]
    return Target(
        package=runtime.package,
        version=runtime.version,
        provider=provider,
        device_type=device_type,
        gradient_kernels=runtime.has_gradient_kernels,
        kernels=recorded_kernel_table(runtime, provider),
        defects=defects_of(runtime.package, runtime.version, provider),
    )


_CUDA_OPTIONS = frozenset(
    [
        "arena_extend_strategy",
        "cudnn_conv1d_pad_to_nc1d",
        "cudnn_conv_algo_search",
        "cudnn_conv_use_max_workspace",
        "device_id",
        "do_copy_in_default_stream",
        "enable_cuda_graph",
        "enable_skip_layer_norm_strict_mode",
        "fuse_conv_bias",
        "gpu_external_alloc",
        "gpu_external_empty_cache",
        "gpu_external_free",
        "gpu_mem_limit",
        "has_user_compute_stream",
        "prefer_nhwc",
        "sdpa_kernel",
        "tunable_op_enable",
        "tunable_op_max_tuning_duration_ms",
        "tunable_op_tuning_enable",
        "use_ep_level_unified_stream",
        "use_tf32",
        "user_compute_stream",
    ]
)
"""Those of onnxruntime 1.31's CUDAExecutionProvider (cuda_execution_provider_info.cc, of its published source)."""


def provider_options(device: torch.device, given: dict[str, str]) -> dict[str, str]:
    """Options of the provider of `device`: ours, overridden by the user's.

    A CUDA session computes on torch's current stream, so no synchronisation is needed at its boundary. The CPU's
    provider takes no option and says nothing of one; those of CUDA are left out there, since a model that trains on
    CUDA may have a graph whose tensors are on the CPU.

    Raises:
        InvalidOptionError: an option that no provider has. CUDA's provider itself refuses those that it does not know.
    """
    if device.type != "cuda":
        if unknown := sorted(given.keys() - _CUDA_OPTIONS):
            expected = f"no {unknown[0]!r}, which {_PROVIDERS['cpu']} does not know: it has no options"
            raise InvalidOptionError(name="provider_options", value=given, expected=expected)
        return {}
    stream = torch.cuda.current_stream(device).cuda_stream
    return {
        "device_id": str(device.index or 0),
        "user_compute_stream": str(stream),
        "do_copy_in_default_stream": "1",
        **given,
    }
