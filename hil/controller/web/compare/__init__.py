"""Data of the comparison page."""
