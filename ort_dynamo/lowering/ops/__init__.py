"""Lowerings by family, forward and gradient side by side; registry.py imports every module of this folder."""
