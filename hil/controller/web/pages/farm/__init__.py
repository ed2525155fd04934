"""Pages of a farm."""
