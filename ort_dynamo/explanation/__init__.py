"""Explains a model before it trains: a dry run, told as text, as data and as a page."""
