"""Symbolic sizes: torch's facts about them, and its functions of them."""
