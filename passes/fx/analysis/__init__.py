"""Analyses of graphs that passes share, and edits that are too long for the pass that makes them."""
