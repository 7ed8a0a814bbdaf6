"""Passes that decide which tensors the forward saves and which the backward recomputes."""
