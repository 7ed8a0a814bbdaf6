"""Runs of a graph that show, compare or time the values inside it."""
