"""AOTAutograd decomposes operators by these formulas before the backend sees the graph."""
