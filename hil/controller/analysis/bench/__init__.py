"""Benchmarks for `hil bench`: measure a program on a board, or compare two programs."""
