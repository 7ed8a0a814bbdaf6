"""The modules that ORTModule called experimental."""
