"""Writes an explanation as one HTML page that needs no other file."""
