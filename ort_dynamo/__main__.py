"""Command line: python -m ort_dynamo demo."""

from __future__ import annotations
