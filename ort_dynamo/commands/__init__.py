"""Subcommands of python -m ort_dynamo, a module or folder each."""
