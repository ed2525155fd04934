"""Traces: calls of a module on a backend, stored in a directory, compared, and replayed on a board."""
