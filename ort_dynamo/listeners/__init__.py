"""Listeners of a compile: what is no part of it, and can be left out."""
