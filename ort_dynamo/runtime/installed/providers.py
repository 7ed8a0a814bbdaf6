"""The execution provider of each torch device, and its options."""

from __future__ import annotations

import dataclasses
from functools import lru_cache

import torch

from ort_dynamo.errors import ProviderNotAvailableError, UnknownSettingError
from ort_dynamo.options.groups import SessionSettings
from ort_dynamo.options.spelling import nearest
from ort_dynamo.runtime.installed.capabilities import (
    TESTED_RUNTIMES,
    InstalledRuntime,
    installed_runtime,
    kernel_table,
    recorded_kernel_table,
    say_if_untested,
)
from ort_dynamo.runtime.installed.cuda_build import Misfit, installed_cuda_build, misfit, replacing, torch_cuda
from ort_dynamo.runtime.installed.defects import defects_of
from ort_dynamo.runtime.installed.importing import onnxruntime
from ort_dynamo.runtime.kernels.session_kernels import can_fuse
from ort_dynamo.targets.target import KernelTable, Target

__all__ = [
    "find_target",
    "not_loaded",
    "provider_options",
    "recorded_cpu_targets",
    "recorded_cuda_targets",
    "usable_target",
]

_PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}


@lru_cache(maxsize=8)
def find_target(device_type: str) -> Target:
    """Return the target for tensors on a device type: facts about its kernels, not whether they load.

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
            reason="the installed ONNX Runtime does not have it" if provider else "no provider serves this device",
            package=runtime.package,
            version=runtime.version,
            available=", ".join(available),
            advice=f"Run {replacing([runtime.package], 'cuda')}, or use the CPU." if provider else "",
        )
    return _target(runtime, device_type, kernel_table(runtime, provider))


def usable_target(device_type: str) -> Target:
    """Return the target for tensors on a device type, whose provider has all the libraries that it needs.

    Raises:
        ProviderNotAvailableError: no provider serves the device, the installed runtime lacks it, or it cannot load.
    """
    target = find_target(device_type)
    if device_type == "cuda" and _cuda_misfit() is not None:
        raise not_loaded(target, torch.device(device_type))
    return _fusing(target) if device_type == "cuda" and can_fuse() else target


@lru_cache(maxsize=8)
def _fusing(target: Target) -> Target:
    return dataclasses.replace(target, fuses_kernels=True)


def not_loaded(target: Target, device: torch.device, error: object = "") -> ProviderNotAvailableError:
    """Return the error for a provider that the installed runtime has and that does not load, with the known reason.

    Args:
        target: the target of the session.
        device: the device of its tensors.
        error: ONNX Runtime's message, if there is one.
    """
    found = _cuda_misfit() if target.device_type == "cuda" else None
    said = f": {error}" if str(error) else " (its libraries, or a device, are missing)"
    return ProviderNotAvailableError(
        provider=target.provider,
        device=device,
        reason=f"it does not load{said}" if found is None else f"it cannot load: {found.reason}",
        package=target.package,
        version=target.version,
        available=", ".join(onnxruntime().get_available_providers()),
        advice="'python -m ort_dynamo doctor' tries it and says more." if found is None else f"Run {found.fix}.",
    )


@lru_cache(maxsize=1)
def _cuda_misfit() -> Misfit | None:
    build = installed_cuda_build()
    return None if build is None else misfit(build, torch_cuda(), installed_runtime().package)


def recorded_cpu_targets() -> tuple[Target, ...]:
    """Return the CPU targets of the tested runtimes, for any installed runtime: for documentation."""
    return tuple(_recorded_target(runtime, "cpu") for runtime in TESTED_RUNTIMES)


def recorded_cuda_targets() -> tuple[Target, ...]:
    """Return the CUDA targets of the tested runtimes, which tell without a GPU where operators would run there."""
    return tuple(_recorded_target(runtime, "cuda") for runtime in TESTED_RUNTIMES)


def _recorded_target(runtime: InstalledRuntime, device_type: str) -> Target:
    return _target(runtime, device_type, recorded_kernel_table(runtime, _PROVIDERS[device_type]))


def _target(runtime: InstalledRuntime, device_type: str, kernels: KernelTable) -> Target:
    provider = _PROVIDERS[device_type]
    return Target(
        package=runtime.package,
        version=runtime.version,
        provider=provider,
        device_type=device_type,
        gradient_kernels=runtime.has_gradient_kernels,
        kernels=kernels,
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


def provider_options(device: torch.device, settings: SessionSettings, stream: str = "") -> dict[str, str]:
    """Give the options of the provider of `device`: ours, overridden by the user's.

    The CPU provider has no options and ignores any. CUDA's are left out there, since a model that trains on CUDA may
    have a graph whose tensors are on the CPU.

    Args:
        device: the device of the session's tensors.
        settings: the user's options, and settings of torch that the provider follows. Like torch, a session gives a
            convolution as much workspace as cuDNN asks for.
        stream: the address of the CUDA stream for the session's kernels and copies.

    Raises:
        UnknownSettingError: no provider has such an option. CUDA's provider itself refuses unknown ones.
    """
    given = dict(settings.provider_options)
    if device.type != "cuda":
        if unknown := sorted(given.keys() - _CUDA_OPTIONS):
            raise UnknownSettingError(
                name="session_options['provider_options']",
                owner=_PROVIDERS["cpu"],
                kind="option",
                value=unknown[0],
                nearest=nearest(unknown[0], _CUDA_OPTIONS),
            )
        return {}
    return {
        # The first device is the provider's default. Releases from 1.26 print a warning for each device_id, which
        # `open_session` silences.
        **({"device_id": str(device.index)} if device.index else {}),
        **({"user_compute_stream": stream} if stream else {}),
        "do_copy_in_default_stream": "1",
        "cudnn_conv_algo_search": "EXHAUSTIVE" if settings.searches_convolutions else "HEURISTIC",
        "cudnn_conv_use_max_workspace": "1",
        "use_tf32": str(int(settings.tf32)),
        **given,
    }
