"""Which execution provider serves which torch device, and with which options."""

from __future__ import annotations

from functools import lru_cache

import torch

from ort_dynamo.errors import ProviderNotAvailableError
from ort_dynamo.runtime.capabilities import (
    TESTED_RUNTIMES,
    installed_runtime,
    kernel_table,
    recorded_kernel_table,
    say_if_untested,
)
from ort_dynamo.runtime.defects import defects_of
from ort_dynamo.runtime.importing import onnxruntime
from ort_dynamo.target import Target

__all__ = ["find_target", "provider_options", "recorded_cpu_targets"]

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
    return tuple(
        Target(
            package=runtime.package,
            version=runtime.version,
            provider=_PROVIDERS["cpu"],
            device_type="cpu",
            gradient_kernels=runtime.has_gradient_kernels,
            kernels=recorded_kernel_table(runtime),
            defects=defects_of(runtime.package, runtime.version, _PROVIDERS["cpu"]),
        )
        for runtime in TESTED_RUNTIMES
    )


def provider_options(device: torch.device, given: dict[str, str]) -> dict[str, str]:
    """Options of the provider of `device`: ours, overridden by the user's.

    A CUDA session computes on torch's current stream, so no synchronisation is needed at its boundary.
    """
    if device.type != "cuda":
        return given
    stream = torch.cuda.current_stream(device).cuda_stream
    return {
        "device_id": str(device.index or 0),
        "user_compute_stream": str(stream),
        "do_copy_in_default_stream": "1",
        **given,
    }
