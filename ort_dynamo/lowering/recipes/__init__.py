"""Helpers by which lowerings write several nodes: sums, loops, branches, windows, indices of scatters."""
