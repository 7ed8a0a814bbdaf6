"""Opens ONNX Runtime sessions."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import onnx_ir as ir
import torch

from ort_dynamo.errors import ProviderNotAvailableError, SessionError
from ort_dynamo.options import SessionSettings
from ort_dynamo.runtime.capabilities import broken_optimizers
from ort_dynamo.runtime.importing import onnxruntime
from ort_dynamo.runtime.providers import provider_options
from ort_dynamo.target import Target

__all__ = ["open_session"]


def open_session(
    model: bytes,
    options: SessionSettings,
    target: Target,
    device: torch.device,
    name: str,
    dtypes: Collection[ir.DataType] = (),
) -> Any:
    """An onnxruntime InferenceSession of a serialised model, on the provider of `target` and on nothing else.

    Args:
        model: a serialised ONNX ModelProto, under 2 GiB.
        options: how to open it.
        target: what the model was lowered for.
        device: the torch device of its tensors.
        name: how errors call the graph, e.g. "forward-1f0a…".
        dtypes: element types of the model's values; they decide which of ONNX Runtime's optimizers are left out.

    Raises:
        ProviderNotAvailableError: the provider is there but does not load.
        SessionError: ONNX Runtime refused the model.
    """
    settings = _session_settings(options, device)
    providers: list[Any] = [(target.provider, provider_options(device, dict(options.provider_options)))]
    if device.type != "cpu":
        providers.append("CPUExecutionProvider")  # shape arithmetic runs there
    try:
        session = onnxruntime().InferenceSession(
            model, settings, providers=providers, disabled_optimizers=broken_optimizers(dtypes)
        )
    except Exception as error:  # pybind exposes about ten unrelated exception classes
        raise SessionError(
            package=target.package, version=target.version, provider=target.provider, graph=name, error=error
        ) from error
    if target.provider not in session.get_providers():
        raise ProviderNotAvailableError(
            provider=target.provider,
            device=device,
            reason="it does not load on this machine (its libraries, or a device, are missing)",
            package=target.package,
            version=target.version,
            available=", ".join(session.get_providers()),
            advice="",
        )
    return session


def _session_settings(options: SessionSettings, device: torch.device) -> Any:
    levels = onnxruntime().GraphOptimizationLevel
    settings = onnxruntime().SessionOptions()
    settings.graph_optimization_level = {
        "disable": levels.ORT_DISABLE_ALL,
        "basic": levels.ORT_ENABLE_BASIC,
        "extended": levels.ORT_ENABLE_EXTENDED,
        "all": levels.ORT_ENABLE_ALL,
    }[options.graph_optimization]
    settings.log_severity_level = 3  # errors only: warnings speak of ONNX Runtime's choices, not of the user's model
    settings.intra_op_num_threads = options.intra_op_num_threads
    settings.inter_op_num_threads = 1
    if device.type == "cpu":
        # torch's threads run between sessions on the same cores; spinning ones would take their time.
        settings.add_session_config_entry("session.intra_op.allow_spinning", "0")
    settings.use_deterministic_compute = options.deterministic
    return settings
