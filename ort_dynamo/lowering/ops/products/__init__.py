"""Lowerings of matrix products and linear algebra."""
