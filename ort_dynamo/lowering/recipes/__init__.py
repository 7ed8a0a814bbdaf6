"""Helpers of lowerings that write several nodes: sums, loops, branches, windows, indices of scatters."""
