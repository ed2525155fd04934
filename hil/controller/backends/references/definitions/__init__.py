"""Compute operators in float64 from their specifications, with numpy and without code of a runtime."""
