"""The values that every stage passes on: dtypes, marks, boundaries, the built graph of an island."""
