"""Index of stored sessions."""
