"""Runtimes that compute references."""
