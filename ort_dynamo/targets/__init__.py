"""The machine that a graph is compiled for: providers as profiles of facts and prices."""
