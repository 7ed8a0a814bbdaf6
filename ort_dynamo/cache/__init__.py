"""Compiled graphs by graph key."""
