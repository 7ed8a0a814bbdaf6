"""Listeners of a compile: parts that it can do without."""
