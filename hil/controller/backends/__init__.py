"""Compilers, compile targets, runtimes and CPU references."""
