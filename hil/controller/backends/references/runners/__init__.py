"""Compute references with runtimes on the host."""
