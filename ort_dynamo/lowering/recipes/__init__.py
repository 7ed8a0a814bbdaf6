"""What lowerings call to write several nodes: sums, loops, branches, windows, places of scatters."""
