"""Lowerings of reductions, scans, sorting and searching."""
