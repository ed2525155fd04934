"""Data of the history pages."""
