"""Saving writes compiled graphs as files that people and other programs can read."""
