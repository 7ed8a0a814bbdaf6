"""Lowerings of views, indexing, scatters and new tensors."""
