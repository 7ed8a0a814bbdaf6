"""The old import path of ORTModule's exceptions."""

from __future__ import annotations

from ort_dynamo.training.ortmodule.fallback import *  # noqa: F403
