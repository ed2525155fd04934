"""Versions and sources of the code that made a result."""
