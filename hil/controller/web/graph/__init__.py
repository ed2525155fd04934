"""Data of the graph pages."""
