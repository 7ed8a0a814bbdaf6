"""Sums, in the order or the precision that a lowering needs."""
