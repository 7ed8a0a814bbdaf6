"""Checks a step of a program against eager mode, and finds the first operator that differs."""
