"""Lowerings of elementwise operators."""
