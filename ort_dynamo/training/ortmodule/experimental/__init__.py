"""What ORTModule called experimental."""
