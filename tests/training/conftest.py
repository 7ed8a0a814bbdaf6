"""Fixtures: no environment variable of ORTModule is set, and no message was logged."""

from __future__ import annotations

import os

import pytest

from ort_dynamo.training.ortmodule import custom_gradients, environment, graph_optimizer_registry


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("ORTMODULE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(environment, "_said", set())
    monkeypatch.setattr(graph_optimizer_registry, "_REGISTERED", [])
    monkeypatch.setattr(custom_gradients, "_DEFINED", {})
