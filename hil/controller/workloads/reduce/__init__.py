"""Reduce a failing model to the smallest model with the same failure."""
