"""Comparison of two tensors, reduced to a size that users can inspect: maps, histograms and the worst elements."""
