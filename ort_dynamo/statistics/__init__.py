"""Statistics of the values that compiled graphs compute, and the comparison of two runs."""
