"""Isolated processes for compilers, importers and references."""
