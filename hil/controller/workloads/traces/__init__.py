"""Traces: the calls of a module on a backend, kept in a folder, compared, and run again on a board."""
