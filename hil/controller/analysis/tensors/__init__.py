"""Comparison of two tensors, reduced to a size that people can inspect: maps, histograms, the worst elements."""
