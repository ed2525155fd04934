"""Operators computed in float64 from the definition of their format: numpy, and nothing of any runtime."""
