"""Data of a session's pages."""
