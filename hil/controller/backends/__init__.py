"""Compilers, targets to compile for, runtimes, and CPU references."""
